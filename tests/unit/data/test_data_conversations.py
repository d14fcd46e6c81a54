"""Prompts that are plain text, and conversations in ShareGPT's form."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.data.build import encode_demonstration
from hybridflow.data.messages import check_messages
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.sft import SFTDataset
from hybridflow.errors import DataError

TALK = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
    {"from": "human", "value": "Bye"},
    {"from": "gpt", "value": "See you"},
]
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


PLAIN = SFTDataConfig(text_key="text")


def row(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "x"}, **more}


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "plain text" in record.getMessage()]


def test_a_plain_prompt_that_meets_a_template_is_noted_once(
    characters: PreTrainedTokenizerFast,
    characters_without_template: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        PromptDataset([row("What is 2 + 2?")] * 3, characters, DataConfig())
        SFTDataset([{"prompt": "a", "response": "b"}] * 3, characters, SFTDataConfig())
    assert len(texts(caplog)) == 2 and all("data.wrap_prompts=true" in text for text in texts(caplog))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        PromptDataset([row("<|im_start|>user\na<|im_end|>\n")], characters, DataConfig())
        PromptDataset([row("a")], characters_without_template, DataConfig())
        PromptDataset([row("a")], characters, DataConfig(wrap_prompts=True))
        PromptDataset([row([{"role": "user", "content": "a"}])], characters, DataConfig())
        SFTDataset([{"prompt": "a", "response": "b"}], characters, SFTDataConfig(wrap_prompts=True))
    assert texts(caplog) == []


def test_wrapped_prompts_are_a_users_messages(
    characters: PreTrainedTokenizerFast, characters_without_template: PreTrainedTokenizerFast
) -> None:
    user = [{"role": "user", "content": "2 + 2?"}]
    wrapped = PromptDataset([row("2 + 2?")], characters, DataConfig(wrap_prompts=True))[0]
    written_out = PromptDataset([row(user)], characters, DataConfig())[0]
    assert wrapped.prompt_token_ids == written_out.prompt_token_ids
    assert wrapped.row["raw_prompt"] == user
    with pytest.raises(DataError, match="no chat template"):
        PromptDataset([row("a")], characters_without_template, DataConfig(wrap_prompts=True))
    pair = [{"prompt": "2 + 2?", "response": "4"}]
    talk = [{"messages": [*user, {"role": "assistant", "content": "4"}]}]
    assert (
        SFTDataset(pair, characters, SFTDataConfig(wrap_prompts=True))[0]
        == SFTDataset(talk, characters, SFTDataConfig())[0]
    )


def test_plain_text_is_learned_as_it_stands(
    characters_without_template: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = characters_without_template
    end = tokenizer.eos_token_id
    with caplog.at_level(logging.WARNING):
        rows = [{"text": "2 + 2"}, {"text": ""}, {"text": f"a{tokenizer.eos_token}"}, {"text": 3}]
        data = SFTDataset(rows, tokenizer, PLAIN)
    assert [row.input_ids for row in data] == [
        [*tokenizer("2 + 2", add_special_tokens=False)["input_ids"], end],
        [*tokenizer("a", add_special_tokens=False)["input_ids"], end],
    ]
    assert [sum(row.loss_mask) for row in data] == [6, 2]
    assert "the text is int, wanted a string" in caplog.text and "empty" in caplog.text
    pair = {"text": "no", "prompt": "a", "response": "b"}
    assert tokenizer.decode(SFTDataset([pair], tokenizer, SFTDataConfig())[0].input_ids).startswith("ab")
    assert tokenizer.decode(SFTDataset([pair], tokenizer, PLAIN)[0].input_ids).startswith("no")
    with pytest.raises(DataError, match=r"no column text; its columns: content; data\.text_key names"):
        SFTDataset([{"content": "b"}], tokenizer, PLAIN)


def test_plain_text_has_the_first_token_of_its_tokenizer_which_is_not_learned(
    characters_without_template: PreTrainedTokenizerFast,
) -> None:
    tokenizer = deepcopy(characters_without_template)
    tokenizer.bos_token = "b"
    first = tokenizer.bos_token_id
    post = TemplateProcessing(single="b $A", special_tokens=[("b", first)])
    tokenizer.backend_tokenizer.post_processor = post
    row = SFTDataset([{"text": "a"}], tokenizer, PLAIN)[0]
    assert (row.input_ids[0], row.loss_mask) == (first, [0, 1, 1])


def test_wrapped_prompts_have_their_answers(characters: PreTrainedTokenizerFast) -> None:
    config = DataConfig(wrap_prompts=True, demonstration_key="answer")
    prompt = PromptDataset([row("2 + 2?", answer="4")], characters, config)[0]
    assert characters.decode(encode_demonstration(characters, prompt, config)) == "4<|im_end|>"


def test_sharegpt_conversations_for_supervised_fine_tuning(characters: PreTrainedTokenizerFast) -> None:
    wanted = SFTDataset([{"messages": MESSAGES}], characters, SFTDataConfig())[0]
    assert SFTDataset([{"conversations": TALK}], characters, SFTDataConfig())[0] == wanted
    named = SFTDataConfig(messages_key="talk")
    assert SFTDataset([{"talk": TALK}], characters, named)[0] == wanted


@pytest.mark.parametrize("column", ["conversations", "prompt"])
def test_sharegpt_conversations_as_prompts(characters: PreTrainedTokenizerFast, column: str) -> None:
    wanted = PromptDataset([row(MESSAGES[:-1])], characters, DataConfig())[0]
    rest = {name: value for name, value in row(None).items() if name != "prompt"}
    item = PromptDataset([{**rest, column: TALK}], characters, DataConfig())[0]
    assert item.prompt_token_ids == wanted.prompt_token_ids and item.row["raw_prompt"] == MESSAGES[:-1]
    config = DataConfig(demonstration_key=column)
    assert characters.decode(encode_demonstration(characters, item, config)) == "See you<|im_end|>"


def test_an_assistants_message_at_the_end_of_a_prompt_stays_where_it_is_no_sharegpt(
    characters: PreTrainedTokenizerFast,
) -> None:
    assert PromptDataset([row(MESSAGES)], characters, DataConfig())[0].row["raw_prompt"] == MESSAGES


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"from": "nobody", "value": "a"}], "from 'nobody', wanted one of human, user, gpt"),
        ([{"from": "human", "value": None}], "content of type NoneType"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "a part of type 'image_url', and what is read here is text",
        ),
    ],
)
def test_messages_that_are_none(messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        check_messages(messages)


def test_roles_of_sharegpt() -> None:
    senders = ["system", "human", "gpt", "tool", "observation"]
    roles = [each["role"] for each in check_messages([{"from": name, "value": "x"} for name in senders])]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    assert check_messages([{"role": "user", "content": "a", "from": None}]) == [
        {"role": "user", "content": "a"}
    ]
