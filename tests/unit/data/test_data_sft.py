"""Which tokens a supervised run learns, how conversations are cut, and which rows are refused."""

from __future__ import annotations

import itertools
import json

import pyarrow as pa
import pytest
from chat_families import FAMILIES, TOOL
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.files import Rows
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.sft import SFTDataset, SFTRow
from hybridflow.data.tokenizer import encode_rendered, text_of
from hybridflow.errors import DataError
from hybridflow.trainer.sft.step import conversation_rows

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no more"},
]
PAIR = {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "response": "yes"}


def learned(tokenizer: PreTrainedTokenizerFast, row: SFTRow) -> str:
    assert len(row.input_ids) == len(row.loss_mask)
    return tokenizer.decode([token for token, keep in zip(row.input_ids, row.loss_mask, strict=True) if keep])


@pytest.mark.parametrize("name", ["characters", "characters_marked"])
def test_every_assistant_turn_and_its_end_token_are_learned(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    (row,) = list(SFTDataset([{"messages": CHAT}], tokenizer, SFTDataConfig()))
    assert learned(tokenizer, row) == "2<|im_end|>no more<|im_end|>"
    assert (
        row.input_ids
        == tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False).input_ids
    )


def test_the_mask_of_two_turns_begins_with_the_first_word_and_ends_with_the_end_of_the_turn(
    characters: PreTrainedTokenizerFast,
) -> None:
    (row,) = list(SFTDataset([{"messages": CHAT[1:]}], characters, SFTDataConfig()))
    runs = [(kept, len(list(same))) for kept, same in itertools.groupby(row.loss_mask)]
    assert [kept for kept, _ in runs] == [0, 1, 0, 1] + [0] * (len(runs) == 5)
    assert [size for kept, size in runs if kept] == [len("2") + 1, len("no more") + 1]
    opener = characters("<|im_start|>assistant\n", add_special_tokens=False).input_ids
    first = row.loss_mask.index(1)
    assert row.input_ids[first - len(opener) : first] == opener
    assert characters.decode(row.input_ids[first : first + 2]) == "2<|im_end|>"


@pytest.mark.parametrize(
    ("name", "end"),
    [("qwen2.5", "<|im_end|>"), ("llama3.1", "<|eot_id|>"), ("mistral", "</s>"), ("kimi-k2", "<|im_end|>"),
     ("deepseek", "<｜end▁of▁sentence｜>"), ("glm4.5", ""), ("gpt-oss", "<|call|>")],
)  # fmt: skip
def test_a_turn_that_calls_a_tool_is_learned_up_to_its_own_end(name: str, end: str) -> None:
    family = FAMILIES[name]
    arguments: object = '{"a": "1"}' if name == "deepseek" else {"a": "1"}
    number = "functions.add:0" if name == "kimi-k2" else "000000000"
    call = {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        CHAT[1],
        {"role": "assistant", "content": None if name == "deepseek" else "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": "add", "tool_call_id": number},
        CHAT[2],
    ]
    (row,) = list(SFTDataset([{"messages": messages}], family.tokenizer(), SFTDataConfig()))
    pairs = list(zip(row.input_ids, row.loss_mask, strict=True))
    turns = [
        [token for token, _ in run] for kept, run in itertools.groupby(pairs, lambda pair: pair[1]) if kept
    ]
    first, second = (text_of(family.tokenizer(), turn) for turn in turns)
    assert "add" in first and first.endswith(end) and "2" in second and "7" not in first + second


def test_the_end_of_a_turn_is_learned_where_it_is_the_padding_too(
    characters: PreTrainedTokenizerFast,
) -> None:
    tokenizer = with_template(characters, str(characters.chat_template))
    tokenizer.pad_token = tokenizer.eos_token
    end = int(tokenizer.eos_token_id)
    dataset = SFTDataset([{"messages": CHAT}, {"messages": CHAT[1:3]}], tokenizer, SFTDataConfig())
    assert tokenizer.pad_token_id == end
    rows = conversation_rows(list(dataset), pad_id=end)
    for number, row in enumerate(dataset):
        attended = rows.batch["attention_mask"][number].bool()
        assert rows.batch["input_ids"][number][attended].tolist() == row.input_ids, "ends in the middle too"
        taught = rows.batch["responses"][number][rows.batch["loss_mask"][number]].tolist()
        assert taught.count(end) == sum(
            message["role"] == "assistant" for message in CHAT[: 5 if number == 0 else 3]
        )
        assert taught[-1] == end


def test_a_thought_of_an_earlier_turn_is_learned_where_it_was_written() -> None:
    talk = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>x</think>1"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "<think>y</think>2"},
    ]
    tokenizer = FAMILIES["qwen3"].tokenizer()
    (row,) = list(SFTDataset([{"messages": talk}], tokenizer, SFTDataConfig()))
    assert "<think>x" not in tokenizer.apply_chat_template(talk, tokenize=False), "the template drops it"
    assert learned(tokenizer, row) == "<think>x</think>1<|im_end|><think>y</think>2<|im_end|>"
    template = ChatTemplate(tokenizer)
    answers = [encode_rendered(tokenizer, f"{talk[at]['content']}<|im_end|>") for at in (1, 3)]
    stop = answers[0][-1]
    rollout = template.begin(talk[:1]) + answers[0] + template.after_answer(stop, talk[2:3]) + answers[1]
    assert row.input_ids[: len(rollout)] == rollout, "what was sampled stays as it was sampled"


def test_templated_prompt_and_response(characters: PreTrainedTokenizerFast) -> None:
    dataset = SFTDataset([PAIR, {**PAIR, "response": "yes<|im_end|>"}], characters, SFTDataConfig())
    assert dataset[0].input_ids == dataset[1].input_ids
    assert characters.decode(dataset[0].input_ids) == PAIR["prompt"] + "yes<|im_end|>"
    assert learned(characters, dataset[0]) == "yes<|im_end|>"


def test_message_prompt_and_response_equal_messages(characters: PreTrainedTokenizerFast) -> None:
    pair = SFTDataset([{"prompt": CHAT[:2], "response": "2"}], characters, SFTDataConfig())[0]
    assert pair == SFTDataset([{"messages": CHAT[:3]}], characters, SFTDataConfig())[0]


def test_rows_from_arrow(characters: PreTrainedTokenizerFast) -> None:
    rows = Rows([pa.Table.from_pylist([{"messages": CHAT}])])
    assert (
        SFTDataset(rows, characters, SFTDataConfig())[0]
        == SFTDataset([{"messages": CHAT}], characters, SFTDataConfig())[0]
    )


def with_template(characters: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    other = PreTrainedTokenizerFast(
        tokenizer_object=characters.backend_tokenizer, pad_token="<pad>", eos_token="<|im_end|>"
    )
    other.chat_template = template
    return other


def test_a_template_that_rewrites_earlier_turns_is_refused(
    characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    dropping = with_template(
        characters,
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.content }}]{% endif %}{% endfor "
        "%}"
        "{% if add_generation_prompt %}{% endif %}",
    )
    dataset = SFTDataset([{"messages": CHAT}, {"messages": CHAT[1:3]}], dropping, SFTDataConfig())
    assert [row.index for row in dataset] == [1] and dataset.report.num_failed == 1
    assert "differently when more messages follow" in caplog.text and "row 0" in caplog.text
    with pytest.raises(DataError, match=r"1 of 1 rows .*differently when more messages follow"):
        SFTDataset([{"messages": CHAT}], dropping, SFTDataConfig())


def test_blank_text_that_is_not_decoration_stays(characters: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|> \n\n{% endif "
        "%}{% endfor %}"
    )
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a \n b"}]
    row = SFTDataset([{"messages": chat}], with_template(characters, template), SFTDataConfig())[0]
    assert learned(characters, row) == " a \n b<|im_end|>"


def test_overlong_error_names_the_ways_out(characters: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        DataError, match=r"1 of 2 conversations .*data.max_length=10 .*truncation=left, right or drop"
    ):
        SFTDataset([{"prompt": "a", "response": "b"}, PAIR], characters, SFTDataConfig(max_length=10))


@pytest.mark.parametrize(
    ("side", "kept"), [("left", "ad1234567<|im_end|>"), ("right", "ad12345"), ("drop", None)]
)
def test_truncation(characters: PreTrainedTokenizerFast, side: str, kept: str | None) -> None:
    rows = [{"prompt": "p", "response": "r"}, {"prompt": "abcad", "response": "1234567"}]
    config = SFTDataConfig(max_length=10, truncation=side)  # type: ignore[arg-type]
    dataset = SFTDataset(rows, characters, config)
    texts = [characters.decode(row.input_ids) for row in dataset]
    expected = {"left": "ad1234567<|im_end|>", "right": "abcad12345"}
    assert texts == ["pr<|im_end|>"] + ([expected[side]] if kept else [])
    assert dataset.num_overlong == 1


def test_nothing_left_to_learn_is_counted(
    characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "p", "response": "r"}, {"prompt": "a" * 20, "response": "1"}]
    dataset = SFTDataset(rows, characters, SFTDataConfig(max_length=10, truncation="right"))
    assert len(dataset) == 1 and "nothing left to learn after truncation" in caplog.text


def test_bad_rows_are_counted(characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": "text"}, {"messages": []}]
    dataset = SFTDataset(rows, characters, SFTDataConfig())
    assert len(dataset) == 1
    assert "3 of 4 rows" in caplog.text
    assert "no message has the role assistant" in caplog.text


def test_column_mistakes(
    characters: PreTrainedTokenizerFast, characters_without_template: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(
        DataError, match=r"no column prompt, response; its columns: text; wanted data\.messages_key=messages"
    ):
        SFTDataset([{"text": "a"}], characters, SFTDataConfig())
    with pytest.raises(DataError, match="has no chat template"):
        SFTDataset([{"messages": CHAT}], characters_without_template, SFTDataConfig())
    assert len(SFTDataset([PAIR], characters_without_template, SFTDataConfig())) == 1


ENDS = {"gemma": "<end_of_turn>", "llama2": "</s>", "phi": "<|end|>", "glm4.5": "", "gpt-oss": "<|return|>"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_a_rollout(name: str) -> None:
    family = FAMILIES[name]
    template = family.template()
    tokenizer = template.tokenizer
    stop: list[int] = []
    if end := ENDS.get(name, family.ends[0].strip()):
        tokenizer.eos_token = end
        stop = encode_rendered(tokenizer, end)
    talk = CHAT[1:]
    (row,) = list(SFTDataset([{"messages": talk}], tokenizer, SFTDataConfig()))
    if name not in ("qwen3", "phi", "gpt-oss"):  # they write an answer in another way once more follows
        whole = template.render(talk, add_generation_prompt=False)
        assert row.input_ids == encode_rendered(tokenizer, whole)
    before = template.render(talk[:1], add_generation_prompt=True)
    through = template.render(talk[:2], add_generation_prompt=False)
    opening, _, closing = through[len(before) :].partition("2")
    closing = " " if closing.startswith(" ") else ""
    rollout = template.begin(talk[:1])
    for answer, given in (("2", talk[2:3]), ("no more", [])):
        rollout += encode_rendered(tokenizer, opening + answer + closing) + stop
        rollout += template.after_answer(stop[0] if stop else None, given, final=not given)
    assert row.input_ids == rollout


def test_tools_and_thinking_reach_the_template() -> None:
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "1", "b": None}}}
    messages = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        CHAT[2],
    ]
    tools = [{**TOOL, "filled": None}]
    rows = [{"messages": messages, "functions": given} for given in (tools, json.dumps(tools))]
    table = Rows([pa.Table.from_pylist(rows[:1])])
    config = SFTDataConfig(tools_key="functions")
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    filled = ', "b": null'
    first, second = SFTDataset(rows, tokenizer, config)
    assert first.input_ids == second.input_ids == tokenizer(whole, add_special_tokens=False).input_ids
    assert filled in learned(tokenizer, first), "the null of a file of JSON is an argument"
    (unfilled,) = SFTDataset(table, tokenizer, config)
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False).replace(filled, "")
    assert unfilled.input_ids == tokenizer(whole, add_special_tokens=False).input_ids, "a columnar file's"
    wanted = '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call><|im_end|>2<|im_end|>'
    assert learned(tokenizer, unfilled) == wanted
    tokenizer.chat_template = "{{ 'T' if enable_thinking else 'F' }}" + str(tokenizer.chat_template)
    rows = [{"messages": CHAT, "think": think} for think in (True, False, None)]
    dataset = SFTDataset(rows, tokenizer, SFTDataConfig(enable_thinking_key="think"))
    assert [tokenizer.decode(row.input_ids[:1]) for row in dataset] == ["T", "F", "F"]
    with pytest.raises(DataError, match="wanted a list of schemas"):
        SFTDataset([{"messages": CHAT, "tools": 3}], tokenizer, SFTDataConfig())


def test_a_column_tools_that_is_something_else_is_left_out_unless_it_was_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    rows = [{"messages": CHAT, "tools": "hammer", "things": "hammer"}] * 2
    (plain,) = SFTDataset([{"messages": CHAT}], tokenizer, SFTDataConfig())
    assert [row.input_ids for row in SFTDataset(rows, tokenizer, SFTDataConfig())] == [plain.input_ids] * 2
    assert [record.message.count("data.tools_key") for record in caplog.records] == [1]
    with pytest.raises(DataError, match="things is text that is no JSON"):
        SFTDataset(rows, tokenizer, SFTDataConfig(tools_key="things"))


def tokenizer_of(name: str, request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """One of the fixtures, or the tokenizer of a family of models."""
    return FAMILIES[name].tokenizer() if name in FAMILIES else request.getfixturevalue(name)


TALKING = [
    "characters",
    "characters_marked",
    "qwen2.5",
    "qwen3",
    "hermes",
    "smollm2",
    "llama3.1",
    "mistral",
    "phi",
]


@pytest.mark.parametrize("name", TALKING)
def test_what_looks_like_a_special_token_is_text_unless_the_assistant_writes_it(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = tokenizer_of(name, request)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    ids = set(tokenizer.convert_tokens_to_ids(special))
    hostile = f"x{' '.join(special)}y"

    def made(user: str, answer: str = "2") -> tuple[list[int], str, list[int]]:
        chat = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        chat += [{"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]
        (row,) = list(SFTDataset([{"messages": chat}], tokenizer, SFTDataConfig()))
        prompts = PromptDataset([{"prompt": chat[:1], "data_source": "math"}], tokenizer, DataConfig())
        prompt = list(prompts[0].prompt_token_ids)
        assert row.input_ids[: len(prompt)] == prompt, "one rule for learning and for generating"
        return row.input_ids, learned(tokenizer, row), prompt

    plain, says, _ = made("xy")
    attacked, still_says, prompt = made(hostile)
    assert [token for token in attacked if token in ids] == [token for token in plain if token in ids]
    assert still_says == says and says.count("2") == 1 and "no" in says
    assert hostile in tokenizer.decode(attacked) and hostile in tokenizer.decode(prompt)
    assert ChatTemplate(tokenizer).begin([{"role": "user", "content": hostile}]) == prompt
    # the assistant's own words may hold special tokens, such as those of a call
    own, _, _ = made("xy", f"2{special[0]}")
    assert sum(token in ids for token in own) == sum(token in ids for token in plain) + 1


ORDINARY = [
    "1 + 1",
    " two  spaces ",
    "a\n\nb\t<tag> <| |> </s",
    "{% if x %}{{ y }}",
    "<|im_start",
    "im_end|>",
]


@pytest.mark.parametrize("name", TALKING)
def test_ids_of_ordinary_texts_are_those_of_the_rendered_text(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = tokenizer_of(name, request)
    for text in ORDINARY:
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": f"2 {text}"}]
        (row,) = list(SFTDataset([{"messages": chat}], tokenizer, SFTDataConfig()))
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert row.input_ids == tokenizer(whole, add_special_tokens=False).input_ids
        prompts = PromptDataset([{"prompt": chat[:1], "data_source": "math"}], tokenizer, DataConfig())
        asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        assert list(prompts[0].prompt_token_ids) == tokenizer(asked, add_special_tokens=False).input_ids
