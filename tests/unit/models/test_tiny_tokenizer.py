"""The tiny tokenizer: exact round trips, short sequences, the chat template."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybridflow.data.chat_template import ChatTemplate, check_conversation
from hybridflow.models.tiny import (
    TOOL_WORDS,
    create_tiny_model,
    create_tiny_tokenizer,
    create_tiny_tool_tokenizer,
)

QUESTION = "3 + 4 - 2 + 5 = ?"
ANSWER = "3 + 4 = 7 . 7 - 2 = 5 . 5 + 5 = 10 . #### 10"
TEXTS = [
    QUESTION, ANSWER, ANSWER + "<|im_end|>", "12 - 305 = -293", "3+4=?", "#### 10", "####10", "a  b\n\nc\t",
    "The user said: assistant!",
    string.printable[:96], "  + - ", " . . ", "",
]  # fmt: skip


@pytest.fixture(params=["made", "loaded"], scope="module")
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    if request.param == "made":
        return create_tiny_tokenizer()
    folder = create_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoTokenizer.from_pretrained(Path(folder))


def test_size_and_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= 128
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.decode(tokenizer.encode("é")) == "<unk>"
    assert tokenizer.decode(tokenizer.encode("7<|im_end|><|pad|>"), skip_special_tokens=True) == "7"


def test_arithmetic_is_short_and_digits_are_the_same_token_everywhere(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(QUESTION)) == [
        "3",
        " + ",
        "4",
        " - ",
        "2",
        " + ",
        "5",
        " = ",
        "?",
    ]
    assert len(tokenizer.encode(ANSWER + "<|im_end|>")) == 23
    assert tokenizer.encode("15")[1] == tokenizer.encode("5 + 1")[0]


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    prompt = "<|im_start|>user\n3 + 4 - 2 + 5 = ?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == prompt
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(ids) <= 20 and ids == tokenizer.encode(prompt)
    long = [
        {"role": "system", "content": "Add."},
        *messages,
        {"role": "assistant", "content": "10"},
        *messages,
        {"role": "assistant", "content": "4 = 4"},
    ]
    told = tokenizer.apply_chat_template(long, return_dict=True, return_assistant_tokens_mask=True)
    learned = [token for token, keep in zip(told["input_ids"], told["assistant_masks"], strict=True) if keep]
    assert tokenizer.decode(learned) == "10<|im_end|>4 = 4<|im_end|>"
    text = tokenizer.apply_chat_template(long, tokenize=False)
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("4 = 4<|im_end|>\n")


CALL = '<tool_call>\n{"name": "add", "arguments": {"text": "3 + 4"}}\n</tool_call>'


WITH_CALLS = [CALL, CALL.replace('"}}', '"}'), "tool add", "<tool_cal>", *TOOL_WORDS]


@pytest.mark.parametrize(
    ("text", "tools"), [*((text, []) for text in TEXTS), *((text, ["add"]) for text in [*TEXTS, *WITH_CALLS])]
)
def test_round_trip(text: str, tools: list[str]) -> None:
    tokenizer = create_tiny_tool_tokenizer(tools) if tools else create_tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_tools_change_no_token_of_other_texts_and_calls_are_short() -> None:
    plain = create_tiny_tokenizer()
    with_tools = create_tiny_tool_tokenizer(["add", "text"])
    assert with_tools.get_vocab().items() >= plain.get_vocab().items()
    assert with_tools.encode(ANSWER) == plain.encode(ANSWER)
    assert len(with_tools.encode(CALL)) == 13


@pytest.mark.parametrize("as_text", [False, True])
def test_tool_template(as_text: bool) -> None:
    tokenizer = create_tiny_tool_tokenizer(["add"])
    template = ChatTemplate(tokenizer)
    arguments: object = '{"text": "3 + 4"}' if as_text else {"text": "3 + 4"}
    question = {"role": "user", "content": "3 + 4 = ?"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }
    result = {"role": "tool", "content": "7", "name": "add", "tool_call_id": "call00000"}
    end = tokenizer.eos_token_id
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = [*template.begin([question], tools), *tokenizer.encode(CALL), end]
    row += [*template.after_answer(end, [result], tools), *tokenizer.encode("7"), end]
    messages = [question, called, result, {"role": "assistant", "content": "7"}]
    assert check_conversation(template, row, messages, tools) is None
    told = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    learned = [token for token, keep in zip(told["input_ids"], told["assistant_masks"], strict=True) if keep]
    assert tokenizer.decode(learned) == f"{CALL}<|im_end|>7<|im_end|>"
    shown = ChatTemplate(tokenizer, {"show_tools": True}).begin([question], tools)
    assert tokenizer.decode(shown).startswith('<|im_start|>system\n[{"type": "function"')
