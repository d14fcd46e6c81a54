"""The data's own answers, as tokens: those that supervised fine-tuning would learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import DataConfig, TaskConfig
from hybridflow.data.build import DemonstratedPrompts, build_prompt_data, encode_demonstration
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.prompts import PromptDataset, PromptRow
from hybridflow.data.sft import encode_conversation
from hybridflow.errors import ConfigError, DataError

ASKED = [{"role": "user", "content": "2 + 2?"}]
TOLD = [*ASKED, {"role": "assistant", "content": "it is 4"}]


def encode(tokenizer: PreTrainedTokenizerFast, value: Any, prompt: Any = ASKED, **config: Any) -> list[int]:
    return encode_demonstration(
        tokenizer, PromptRow([1], {"messages": value, "raw_prompt": prompt}, 0), DataConfig(**config)
    )


@pytest.mark.parametrize("template", ["characters", "characters_marked"])
def test_the_answer_is_its_text_and_the_end_token(template: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(template)
    ids = encode(tokenizer, TOLD)
    assert tokenizer.decode(ids) == "it is 4<|im_end|>"
    whole, mask = encode_conversation(ChatTemplate(tokenizer), TOLD)
    assert ids == [token for token, learned in zip(whole, mask, strict=True) if learned], "what SFT learns"
    assert encode(tokenizer, "it is 4") == ids, "text goes by the template, too"
    start = whole.index(ids[0], mask.index(1))
    prompt = PromptDataset([{"prompt": ASKED}], tokenizer, DataConfig())[0].prompt_token_ids
    assert whole[:start] == prompt, "the answer continues the prompt that is generated from"


def test_only_the_last_answer_of_a_conversation(characters: PreTrainedTokenizerFast) -> None:
    asked = [*TOLD, {"role": "user", "content": "sure?"}]
    told = [*asked, {"role": "assistant", "content": "yes"}]
    assert characters.decode(encode(characters, told, asked)) == "yes<|im_end|>"


def test_an_answer_to_a_templated_prompt(characters_without_template: PreTrainedTokenizerFast) -> None:
    ids = encode(characters_without_template, " is 4", "2 + 2")
    assert characters_without_template.decode(ids) == " is 4<|im_end|>"


@pytest.mark.parametrize(
    ("value", "prompt", "reason"),
    [
        (None, ASKED, "no answer in the column messages"),
        (ASKED, ASKED, "role user, wanted an answer of the assistant"),
        (TOLD, [{"role": "user", "content": "3 + 3?"}], "are not the prompt of the row"),
        ("", "2 + 2", "empty"),
        ("", ASKED, "the answer is empty"),
        ([*ASKED, {"role": "assistant", "content": ""}], ASKED, "the answer is empty"),
        ([*TOLD, ASKED[0], {"role": "assistant", "content": ""}], [*TOLD, ASKED[0]], "the answer is empty"),
        (7, ASKED, "int, wanted a list of messages"),
    ],
)
def test_what_is_no_answer(characters: PreTrainedTokenizerFast, value: Any, prompt: Any, reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        encode(characters, value, prompt)


def test_rows_without_a_usable_answer_are_left_out_and_counted(
    characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": ASKED, "gold": text} for text in ("first", None, "much too long", "last", "")]
    config = DataConfig(demonstration_key="gold", max_response_length=8)
    data = DemonstratedPrompts(PromptDataset(rows, characters, config), characters, config)
    assert [characters.decode(data[i].demonstration_token_ids) for i in range(len(data))] == [
        "first<|im_end|>",
        "last<|im_end|>",
    ]
    assert [data[i].index for i in range(len(data))] == [0, 3]
    assert "3 of 5 rows" in caplog.text and "row 4: ValueError: the answer is empty" in caplog.text
    assert "14 tokens, more than data.max_response_length=8" in caplog.text
    with pytest.raises(DataError, match=r"5 of 5 rows .*data\.demonstration_key=messages.* cannot be used"):
        DemonstratedPrompts(PromptDataset(rows, characters, DataConfig()), characters, DataConfig())


def test_rows_that_name_agents_are_refused(characters: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    row = {
        "prompt": ASKED,
        "messages": [*ASKED, {"role": "assistant", "content": "yes"}],
        "agent_name": "talker",
    }
    (tmp_path / "rows.json").write_text(json.dumps([row] * 4))
    config = DataConfig(train_files=[str(tmp_path / "rows.json")], train_batch_size=4)
    assert build_prompt_data(config, characters, 0).agent_names == {"talker"}
    with pytest.raises(ConfigError, match=r"agent_name talker.* leave the column agent_name out"):
        build_prompt_data(config, characters, 0, demonstrations=True)


def test_the_loader_brings_the_answers_of_a_task(characters: PreTrainedTokenizerFast) -> None:
    config = DataConfig(
        task=TaskConfig(name="arithmetic_chain", size=6, val_size=2), train_batch_size=4, gen_batch_size=3
    )
    data = build_prompt_data(config, characters, 0, dynamic_sampling=True, demonstrations=True)
    assert data.train_loader is not None and data.val_dataset is not None
    assert data.data_sources == {"arithmetic_chain"}, "also where the answers are beside the prompts"
    batch = next(iter(data.train_loader))
    assert len(batch) == 3, "as many as dynamic sampling asks for"
    assert len(next(iter(build_prompt_data(config, characters, 0).train_loader))) == 4  # type: ignore[arg-type]
    for row in batch:
        answer, truth = (
            characters.decode(row.demonstration_token_ids),
            row.row["reward_model"]["ground_truth"],
        )
        assert answer == row.row["messages"][-1]["content"] + "<|im_end|>" and answer.endswith(
            f"#### {truth}<|im_end|>"
        )
    assert data.val_dataset[0].demonstration_token_ids is None
    with pytest.raises(DataError, match=r"6 usable rows, fewer than data\.gen_batch_size=7"):
        build_prompt_data(
            DataConfig(task=config.task, train_batch_size=4, gen_batch_size=7),
            characters,
            0,
            dynamic_sampling=True,
        )
