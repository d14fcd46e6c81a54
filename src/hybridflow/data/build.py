"""From the `data.*` keys to datasets and loaders: the one place where a choice of data meets its class."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.config.data import DataConfig, SamplerConfig, SFTDataConfig, TaskConfig
from hybridflow.data.demonstrations import DemonstratedPrompts
from hybridflow.data.files import Rows, as_list, load_rows
from hybridflow.data.loader import MapDataset, StatefulLoader
from hybridflow.data.plugin import blaming, join_spec, load_function
from hybridflow.data.prompts import PromptDataset, PromptRow
from hybridflow.data.samplers import CurriculumSampler, Sampler, SequentialSampler, ShuffledSampler
from hybridflow.data.sft import SFTDataset, SFTRow
from hybridflow.data.tasks import Split, build_task
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.randomness import generator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptData:
    """What a run of the PPO family reads; either half may be missing."""

    train_loader: StatefulLoader[PromptRow] | None
    val_dataset: MapDataset[PromptRow] | None

    def finish_batch(self, batch: Any) -> None:
        """Tell a curriculum sampler about a finished training batch (a DataProto); nothing with any other
        sampler.
        """
        if self.train_loader is not None and isinstance(self.train_loader.sampler, CurriculumSampler):
            with blaming(f"data.sampler: {type(self.train_loader.sampler).__name__}.update"):
                self.train_loader.sampler.update(batch)


@dataclass(frozen=True)
class SFTData:
    """What a supervised run reads; the validation half may be missing."""

    train_loader: StatefulLoader[SFTRow]
    val_dataset: SFTDataset | None


def build_prompt_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    *,
    dynamic_sampling: bool = False,
    demonstrations: bool = False,
) -> PromptData:
    """Loader of training prompts and dataset of validation prompts; `data.seed` goes before `seed`.

    With `dynamic_sampling` the loader gives `data.gen_batch_size` prompts at a time (null:
    `data.train_batch_size`). With `demonstrations` each training prompt has the data's own answer with it,
    and rows without a usable one are left out, counted and shown. Raises DataError for data that cannot be
    used, ConfigError for keys that do not go together.
    """
    seed = seed if config.seed is None else config.seed
    train = _prompt_dataset(config, tokenizer, "train", seed)
    loader = None
    if train is not None:
        if demonstrations:
            train = DemonstratedPrompts(train, tokenizer, config)
        sampler = _sampler(config.sampler, train, config.shuffle, seed)
        key = "gen_batch_size" if dynamic_sampling and config.gen_batch_size else "train_batch_size"
        workers = config.dataloader_num_workers
        loader = StatefulLoader(
            train, sampler, getattr(config, key), drop_last=True, num_workers=workers, size_key=f"data.{key}"
        )
    return PromptData(loader, _prompt_dataset(config, tokenizer, "validation", seed))


def build_sft_data(config: SFTDataConfig, tokenizer: Tokenizer, seed: int) -> SFTData:
    """Loader of training conversations and dataset of validation conversations.

    Raises DataError for data that cannot be used, ConfigError for keys that do not go together.
    """
    train_rows = _rows(config, "train", seed)
    if train_rows is None:
        raise ConfigError(
            "data.train_files is empty and data.task.name is not set: there is nothing to train on"
        )
    train = SFTDataset(train_rows, tokenizer, config)
    sampler: Sampler = ShuffledSampler(train, seed) if config.shuffle else SequentialSampler(train)
    loader = StatefulLoader(
        train, sampler, config.train_batch_size, drop_last=True, num_workers=config.dataloader_num_workers
    )
    val_rows = _rows(config, "validation", seed)
    return SFTData(loader, None if val_rows is None else SFTDataset(val_rows, tokenizer, config))


def _prompt_dataset(
    config: DataConfig, tokenizer: Tokenizer, split: Split, seed: int
) -> MapDataset[PromptRow] | None:
    spec = join_spec(config.custom_cls.path, config.custom_cls.name, key="data.custom_cls")
    if spec is None:
        rows = _rows(config, split, seed)
        dataset: MapDataset[PromptRow] | None = (
            None if rows is None else PromptDataset(rows, tokenizer, config)
        )
    else:
        files = as_list(config.train_files if split == "train" else config.val_files)
        dataset = _custom_dataset(spec, files, tokenizer, config) if files else None
    if dataset is not None:
        logger.info("%s: %d prompts", split, len(dataset))
    return dataset


def _custom_dataset(
    spec: str, files: list[str], tokenizer: Tokenizer, config: DataConfig
) -> MapDataset[PromptRow]:
    if config.task.name is not None:
        raise ConfigError(
            f"data.custom_cls ({spec}) reads data files, and data.task.name={config.task.name} is set too: "
            "unset one of them"
        )
    dataset = load_function(spec, key="data.custom_cls")(files, tokenizer, config)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"data.custom_cls ({spec}) gave {type(dataset).__name__}, wanted an object with __len__ and "
            "__getitem__"
        )
    if not len(dataset):
        raise DataError(f"data.custom_cls ({spec}) gave no rows from {', '.join(files)}")
    with blaming(f"data.custom_cls: item 0 of {spec}"):
        first = dataset[0]
    if isinstance(first, PromptRow):
        return dataset  # type: ignore[no-any-return]
    if isinstance(first, dict):
        return PromptDataset(
            Rows([[dataset[i] for i in range(len(dataset))]], source=spec), tokenizer, config
        )
    raise ConfigError(
        f"data.custom_cls ({spec}) gives items of type {type(first).__name__}, wanted PromptRow or a row dict"
    )


def _rows(config: DataConfig | SFTDataConfig, split: Split, seed: int) -> Rows | None:
    """The rows of one split from files or from the task; at most `*_max_samples` of them, in
    `validation_shuffle`'s order.
    """
    files = as_list(config.train_files if split == "train" else config.val_files)
    short = "train" if split == "train" else "val"
    if config.task.name is not None:
        if files:
            raise ConfigError(
                f"data.task.name={config.task.name} and data.{short}_files={files} are both set: unset one"
            )
        rows = _task_rows(config.task, split)
    else:
        rows = load_rows(files, config.cache_dir) if files else None
    if rows is None:
        return None
    limit = config.train_max_samples if split == "train" else config.val_max_samples
    shuffle = config.shuffle if split == "train" else getattr(config, "validation_shuffle", False)
    return _subset(rows, limit, shuffle, split, seed)


def _task_rows(config: TaskConfig, split: Split) -> Rows | None:
    size = config.size if split == "train" else config.val_size
    return Rows([build_task(config).rows(split, size)], source=f"{config.name} ({split})") if size else None


def _subset(rows: Rows, limit: int, shuffle: bool, split: Split, seed: int) -> Rows:
    if 0 <= limit < len(rows) or (split == "validation" and shuffle):
        if limit == 0:
            raise DataError(
                f"data.{'train' if split == 'train' else 'val'}_max_samples=0 leaves no rows; -1 means all"
            )
        size = min(limit, len(rows)) if limit > 0 else len(rows)
        chosen = (
            torch.randperm(len(rows), generator=generator(seed, f"{split}_subset"))[:size].tolist()
            if shuffle
            else list(range(size))
        )
        return rows.take(chosen if split == "validation" else sorted(chosen))
    return rows


def _sampler(config: SamplerConfig, dataset: MapDataset[Any], shuffle: bool, seed: int) -> Sampler:
    spec = join_spec(config.class_path, config.class_name, key="data.sampler")
    if spec is None:
        return ShuffledSampler(dataset, seed) if shuffle else SequentialSampler(dataset)
    sampler = load_function(spec, key="data.sampler")(dataset, seed)
    missing = [name for name in ("__iter__", "__len__", "set_epoch") if not hasattr(sampler, name)]
    if missing:
        raise ConfigError(
            f"data.sampler ({spec}) has no {', '.join(missing)}; a sampler has __iter__, __len__ and "
            "set_epoch(epoch)"
        )
    return sampler  # type: ignore[no-any-return]
