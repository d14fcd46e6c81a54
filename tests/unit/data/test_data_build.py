"""From the keys to datasets and loaders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import CustomClassConfig, DataConfig, SamplerConfig, SFTDataConfig, TaskConfig
from hybridflow.data.build import build_prompt_data, build_sft_data
from hybridflow.errors import ConfigError, DataError

TASK = TaskConfig(name="arithmetic_chain", size=40, val_size=12)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(
            json.dumps({"data_source": "s", "prompt": f"q{i}", "answer": str(i)}) + "\n" for i in range(20)
        )
    )
    return str(path)


def indices(loader) -> list[int | str]:  # type: ignore[no-untyped-def]
    return [row.index for batch in loader for row in batch]


def test_task_gives_both_splits(characters: PreTrainedTokenizerFast) -> None:
    data = build_prompt_data(DataConfig(task=TASK, train_batch_size=8), characters, seed=0)
    assert data.train_loader is not None and data.val_dataset is not None
    assert len(data.train_loader) == 5 and [len(batch) for batch in data.train_loader] == [8] * 5
    assert [data.val_dataset[i].index for i in range(12)] == list(range(12))
    assert data.val_dataset[0].row["extra_info"]["split"] == "validation"


def test_files_order_and_seeds(characters: PreTrainedTokenizerFast, prompts: str) -> None:
    def order(**keys: object) -> list[int | str]:
        data = build_prompt_data(
            DataConfig(train_files=prompts, train_batch_size=5, **keys), characters, seed=1
        )  # type: ignore[arg-type]
        assert data.val_dataset is None
        return indices(data.train_loader)

    assert order(shuffle=False) == list(range(20))
    assert order() == order(seed=1) != order(seed=2)
    assert order(train_max_samples=10, shuffle=False) == list(range(10))
    data = build_prompt_data(
        DataConfig(train_files=prompts, train_batch_size=5, train_max_samples=10), characters, seed=1
    )
    assert data.train_loader is not None
    answers = [row.row["answer"] for batch in data.train_loader for row in batch]
    assert len(set(answers)) == 10, "a shuffled run takes a random part"
    assert set(answers) != {str(i) for i in range(10)}, "a shuffled run takes a random part"


def test_validation_rows(characters: PreTrainedTokenizerFast, prompts: str) -> None:
    def order(**keys: object) -> list[int | str]:
        dataset = build_prompt_data(DataConfig(val_files=[prompts], **keys), characters, seed=1).val_dataset  # type: ignore[arg-type]
        assert dataset is not None
        return [dataset[i].row["answer"] for i in range(len(dataset))]

    assert order() == [str(i) for i in range(20)]
    assert order(val_max_samples=3) == ["0", "1", "2"]
    assert order(validation_shuffle=True) != order()
    assert sorted(order(validation_shuffle=True)) == sorted(order())


def test_mistakes(characters: PreTrainedTokenizerFast, prompts: str) -> None:
    with pytest.raises(DataError, match=r"20 usable rows, fewer than data\.train_batch_size=1024"):
        build_prompt_data(DataConfig(train_files=prompts), characters, 0)
    with pytest.raises(
        ConfigError, match=r"data\.task\.name=arithmetic_chain and data\.train_files=.* are both set"
    ):
        build_prompt_data(DataConfig(train_files=prompts, task=TASK), characters, 0)
    with pytest.raises(ConfigError, match="nothing to train on"):
        build_sft_data(SFTDataConfig(), characters, 0)


CUSTOM = """
from collections.abc import Iterator
from hybridflow.data.files import load_rows
from hybridflow.data.prompts import PromptDataset, PromptRow

class Mine(PromptDataset):
    def __init__(self, files, tokenizer, config):
        rows = [{**row, "prompt": "new " + row["prompt"]} for row in load_rows(files)]
        super().__init__(rows, tokenizer, config)

class Dicts:
    def __init__(self, files, tokenizer, config): self.size = 6
    def __len__(self): return self.size
    def __getitem__(self, i): return {"data_source": "d", "prompt": "x" * (i + 1), "answer": i}

class Empty(Dicts):
    def __len__(self): return 0

class Reverse:
    def __init__(self, dataset, seed): self.size, self.told = len(dataset), []
    def set_epoch(self, epoch): pass
    def __iter__(self): return iter(range(self.size - 1, -1, -1))
    def __len__(self): return self.size
    def update(self, batch): self.told.append(batch)

def not_a_sampler(dataset, seed): return 5
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CUSTOM)
    return str(tmp_path / "mine.py")


def test_custom_dataset_class(characters: PreTrainedTokenizerFast, prompts: str, plugin: str) -> None:
    config = DataConfig(
        train_files=prompts, train_batch_size=5, shuffle=False, custom_cls=CustomClassConfig(plugin, "Mine")
    )
    data = build_prompt_data(config, characters, 0)
    assert data.train_loader is not None
    assert characters.decode(next(iter(data.train_loader))[1].prompt_token_ids) == "new q1"


def test_custom_dataset_of_dicts_is_encoded_and_filtered(
    characters: PreTrainedTokenizerFast, prompts: str, plugin: str
) -> None:
    custom = CustomClassConfig(f"{plugin}:Dicts")
    config = DataConfig(
        val_files=prompts, max_prompt_length=4, filter_overlong_prompts=True, custom_cls=custom
    )
    dataset = build_prompt_data(config, characters, 0).val_dataset
    assert dataset is not None and len(dataset) == 4 and dataset[3].row["reward_model"]["ground_truth"] == 3


def test_custom_dataset_mistakes(characters: PreTrainedTokenizerFast, prompts: str, plugin: str) -> None:
    def build(custom: CustomClassConfig) -> None:
        build_prompt_data(DataConfig(val_files=prompts, custom_cls=custom), characters, 0)

    with pytest.raises(DataError, match="gave no rows"):
        build(CustomClassConfig(plugin, "Empty"))
    with pytest.raises(ConfigError, match="has no name 'Nope'"):
        build(CustomClassConfig(plugin, "Nope"))
    with pytest.raises(ConfigError, match="which object"):
        build(CustomClassConfig(plugin))


def test_custom_sampler_is_told_finished_batches(
    characters: PreTrainedTokenizerFast, prompts: str, plugin: str
) -> None:
    config = DataConfig(train_files=prompts, train_batch_size=5, sampler=SamplerConfig(plugin, "Reverse"))
    data = build_prompt_data(config, characters, 0)
    assert data.train_loader is not None and indices(data.train_loader) == list(range(19, -1, -1))
    data.finish_batch("batch")
    assert data.train_loader.sampler.told == ["batch"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="has no __iter__, __len__, set_epoch"):
        bad = DataConfig(
            train_files=prompts, train_batch_size=5, sampler=SamplerConfig(f"{plugin}:not_a_sampler")
        )
        build_prompt_data(bad, characters, 0)


def test_sft_from_a_task(characters: PreTrainedTokenizerFast) -> None:
    data = build_sft_data(SFTDataConfig(task=TASK, train_batch_size=8), characters, 0)
    assert len(data.train_loader) == 5 and data.val_dataset is not None and len(data.val_dataset) == 12
    row = next(iter(data.train_loader))[0]
    text = characters.decode(
        [token for token, keep in zip(row.input_ids, row.loss_mask, strict=True) if keep]
    )
    assert "#### " in text and text.endswith("<|im_end|>")
