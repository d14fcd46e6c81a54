"""Prompts: tokenising by template or as they stand, lengths, rows that fail, the fields a row always has."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import DataConfig
from hybridflow.data.files import load_rows
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.row_schema import complete_row
from hybridflow.data.tokenizer import encode_prompt, load_tokenizer, save_tokenizer
from hybridflow.errors import DataError, ModelError


def row(content: object, **more: object) -> dict:
    return {
        "data_source": "s",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 7},
        **more,
    }


def test_messages_are_templated_with_the_generation_prompt(characters: PreTrainedTokenizerFast) -> None:
    (item,) = list(PromptDataset([row("1 + 1", agent_name="x")], characters, DataConfig()))
    assert (
        characters.decode(item.prompt_token_ids)
        == "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert item.index == 7 and item.row["index"] == 7 and item.row["agent_name"] == "x"
    assert item.row["raw_prompt"] == [{"role": "user", "content": "1 + 1"}]
    assert item.row["reward_model"]["ground_truth"] == "1" and item.row["data_source"] == "s"


def test_templated_string_is_taken_as_it_stands(characters: PreTrainedTokenizerFast) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    item = PromptDataset([{"data_source": "s", "prompt": text}], characters, DataConfig())[0]
    assert item.prompt_token_ids == characters(text, add_special_tokens=False).input_ids


def test_first_token_is_never_doubled_and_no_end_is_added(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <|im_end|>", special_tokens=[("<bos>", bos), ("<|im_end|>", eos)]
    )
    assert tokenizer("ab").input_ids[0] == bos and tokenizer("ab").input_ids[-1] == eos
    plain = tokenizer("ab", add_special_tokens=False).input_ids
    assert encode_prompt(tokenizer, "ab") == [bos, *plain]
    assert encode_prompt(tokenizer, "<bos>ab") == [bos, *plain]


def test_nulls_of_a_columnar_file_do_not_reach_the_template(
    tmp_path: Path, characters: PreTrainedTokenizerFast
) -> None:
    rows = [row("a"), row("b")]
    rows[1]["prompt"][0]["name"] = "bob"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokenizer = load_tokenizer_with(
        characters, "{% for m in messages %}{{ 'N' if m.name is defined else '-' }}{% endfor %}"
    )
    dataset = PromptDataset(load_rows(str(tmp_path / "a.parquet")), tokenizer, DataConfig())
    assert [tokenizer.decode(item.prompt_token_ids) for item in dataset] == ["-", "N"]


def load_tokenizer_with(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<|im_end|>"
    )
    other.chat_template = template
    return other


def test_template_arguments_pass_through(characters: PreTrainedTokenizerFast) -> None:
    tokenizer = load_tokenizer_with(characters, "{{ 'T' if enable_thinking else 'F' }}")
    item = PromptDataset(
        [row("a")], tokenizer, DataConfig(apply_chat_template_kwargs={"enable_thinking": True})
    )[0]
    assert tokenizer.decode(item.prompt_token_ids) == "T"


def test_answer_column_is_the_ground_truth_where_there_is_no_reward_model(
    characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": "5"}]
    caplog.set_level(logging.INFO, logger="hybridflow")
    dataset = PromptDataset(rows, characters, DataConfig())
    assert [item.row["reward_model"] for item in dataset] == [
        {"style": "rule", "ground_truth": a} for a in "45"
    ]
    assert [item.row["data_source"] for item in dataset] == ["data", "data"]
    assert [item.index for item in dataset] == [0, 1]
    assert caplog.text.count("the column answer is the ground truth") == 1
    assert caplog.text.count("data.reward_fn_key") == 1
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [message for message in warned if "has no column" in message], "a layout that works"


def test_reward_fn_key_names_the_source(characters: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "a", "kind": "gsm8k"}]
    assert PromptDataset(rows, characters, DataConfig(reward_fn_key="kind"))[0].row["data_source"] == "gsm8k"
    with pytest.raises(
        DataError, match=r"no column source; its columns: prompt, kind; set data\.reward_fn_key"
    ):
        PromptDataset(rows, characters, DataConfig(reward_fn_key="source"))


def test_missing_prompt_column(characters: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        DataError, match=r"has no column question; its columns: .*prompt.*; set data\.prompt_key"
    ):
        PromptDataset([row("a")], characters, DataConfig(prompt_key="question"))


ROWS_OF_LENGTHS = [
    {"data_source": "s", "prompt": "a" * 3},
    {"data_source": "s", "prompt": "abcdefgh"},
    {"data_source": "s", "prompt": "b"},
]


def test_overlong_is_an_error_that_names_the_ways_out(characters: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        DataError,
        match=r"1 of 3 prompts .*data.max_prompt_length=5 .*has 8; first rows: 1.*filter_overlong_prompts",
    ):
        PromptDataset(ROWS_OF_LENGTHS, characters, DataConfig(max_prompt_length=5))


def test_overlong_filter_counts(
    characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = PromptDataset(
        ROWS_OF_LENGTHS, characters, DataConfig(max_prompt_length=5, filter_overlong_prompts=True)
    )
    assert len(dataset) == 2 and dataset.num_overlong == 1 and [item.index for item in dataset] == [0, 2]
    assert "1 of 3 prompts" in caplog.text
    with pytest.raises(DataError, match="leaves none"):
        PromptDataset(
            ROWS_OF_LENGTHS[1:2], characters, DataConfig(max_prompt_length=5, filter_overlong_prompts=True)
        )


@pytest.mark.parametrize(("side", "kept"), [("left", "defgh"), ("right", "abcde"), ("middle", "abfgh")])
def test_truncation(characters: PreTrainedTokenizerFast, side: str, kept: str) -> None:
    dataset = PromptDataset(ROWS_OF_LENGTHS, characters, DataConfig(max_prompt_length=5, truncation=side))  # type: ignore[arg-type]
    assert [characters.decode(item.prompt_token_ids) for item in dataset] == ["aaa", kept, "b"]


def test_rows_that_fail_are_counted_and_shown(
    characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        row("good"),
        row(5),
        row("x", prompt=[]),
        row("x", prompt=None),
        row("x", reward_model="rule"),
        row("also good"),
    ]
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(rows, characters, DataConfig())
    assert len(dataset) == 2 and dataset.report.num_failed == 4
    assert "4 of 6 rows" in caplog.text
    assert "row 1: TypeError: message 0 (user) has content of type int" in caplog.text
    assert [characters.decode(item.prompt_token_ids)[17:21] for item in dataset] == ["good", "also"]


def test_a_template_that_raises_on_every_row_is_an_error(characters: PreTrainedTokenizerFast) -> None:
    tokenizer = load_tokenizer_with(characters, "{{ raise_exception('system first') }}")
    with pytest.raises(DataError, match=r"2 of 2 rows .*system first"):
        PromptDataset([row("a"), row("b")], tokenizer, DataConfig())


def test_no_chat_template_names_the_remedy(characters_without_template: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        PromptDataset([row("a")], characters_without_template, DataConfig())
    assert (
        len(PromptDataset([{"data_source": "s", "prompt": "a"}], characters_without_template, DataConfig()))
        == 1
    )


def test_load_tokenizer(tokenizer_folder: Path, characters: PreTrainedTokenizerFast) -> None:
    assert load_tokenizer(tokenizer_folder)("3 + 4").input_ids == characters("3 + 4").input_ids


@pytest.mark.parametrize("offline", [False, True])
def test_a_saved_tokenizer_has_nothing_of_the_process_that_loaded_it(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr("transformers.tokenization_utils_base.is_offline_mode", lambda: offline)
    save_tokenizer(load_tokenizer(tokenizer_folder), tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "local_files_only" not in saved and "is_local" not in saved and saved["pad_token"]


def test_load_tokenizer_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no folder /no/such/folder"):
        load_tokenizer("/no/such/folder")
    with pytest.raises(ModelError, match="no folder"):
        load_tokenizer(f"{tmp_path}/none")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ModelError, match="no folder"):
        load_tokenizer(f"{tmp_path.name}/none")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path)


def test_pad_token_from_end_token(
    tmp_path: Path, characters: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=characters.backend_tokenizer, eos_token="<|im_end|>"
    ).save_pretrained(tmp_path / "a")
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(tmp_path / "a")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 3
    assert caplog.text.count("padding with its end token") == 1
    PreTrainedTokenizerFast(tokenizer_object=characters.backend_tokenizer).save_pretrained(tmp_path / "b")
    with pytest.raises(ModelError, match="neither a pad token nor an end token"):
        load_tokenizer(tmp_path / "b")


def test_columns_of_ones_own_reach_the_reward_in_extra_info() -> None:
    row = {"prompt": "1 + 1 =", "answer": "2", "target": "two", "hard": True, "seed": 3, "agent_name": "mine"}
    complete = complete_row({**row}, 11, DataConfig())
    assert complete["extra_info"] == {"answer": "2", "target": "two", "hard": True, "index": 11}
    own = {**row, "extra_info": {"target": "kept", "index": 7}}
    assert complete_row(own, 11, DataConfig())["extra_info"] == {
        "answer": "2", "target": "kept", "hard": True, "index": 7
    }  # fmt: skip
