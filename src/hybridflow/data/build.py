"""Builders of datasets and loaders: the one place where the `data.*` keys meet the classes they choose, and
where answers of the data become rows that are learned from (SPIN).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch

from hybridflow.config.data import DataConfig, SamplerConfig, SFTDataConfig
from hybridflow.config.preference import PreferenceDataConfig, RewardDataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.files import RaggedInts, Rows, as_list, load_rows
from hybridflow.data.growing import GrowingPrompts
from hybridflow.data.loader import (
    CurriculumSampler,
    Item,
    MapDataset,
    Sampler,
    SequentialSampler,
    ShuffledSampler,
    StatefulLoader,
)
from hybridflow.data.media import MediaReader
from hybridflow.data.messages import SHAREGPT, check_messages
from hybridflow.data.plugin import blaming, join_spec, load_function
from hybridflow.data.preference import Comparison, PreferenceDataset, StepDataset
from hybridflow.data.prompts import PromptDataset, PromptRow
from hybridflow.data.row_report import RowReport
from hybridflow.data.sft import SFTDataset, SFTRow, encode_conversation, encode_pair, last_answer
from hybridflow.data.tasks import Split, build_task
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.protocol.randomness import generator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptData:
    """The data of a run of the PPO family; either half may be missing."""

    train_loader: StatefulLoader[PromptRow] | None
    val_dataset: MapDataset[PromptRow] | None

    @property
    def agent_names(self) -> set[str]:
        """Names of agents that rows of the built-in dataset give in a column `agent_name`."""
        datasets = [self.val_dataset]
        if self.train_loader is not None:
            datasets.append(self.train_loader.dataset)
        return {
            name for dataset in datasets if isinstance(dataset, PromptDataset) for name in dataset.agent_names
        }

    @property
    def data_sources(self) -> set[str] | None:
        """Data sources of the training rows; None where the dataset is not the built-in one."""
        dataset = self._train
        return dataset.data_sources if isinstance(dataset, PromptDataset) else None

    @property
    def has_media(self) -> bool:
        """Whether a row of a built-in dataset has pictures or videos."""
        datasets = [self.val_dataset, self._train]
        return any(dataset.has_media for dataset in datasets if isinstance(dataset, PromptDataset))

    @property
    def _train(self) -> MapDataset[PromptRow] | None:
        """The training prompts, without the answers of the data that may go with them."""
        dataset = self.train_loader.dataset if self.train_loader is not None else None
        return dataset.dataset if isinstance(dataset, DemonstratedPrompts) else dataset

    @property
    def reads_batches(self) -> bool:
        """Whether a curriculum sampler or a dataset that grows is given the finished batches."""
        loader = self.train_loader
        return loader is not None and (
            isinstance(loader.sampler, CurriculumSampler) or isinstance(loader.dataset, GrowingPrompts)
        )

    def finish_batch(self, batch: Any) -> None:
        """Give a finished training batch (a DataProto) to a curriculum sampler, and to a dataset that grows;
        others do not see it.
        """
        loader = self.train_loader
        if loader is None:
            return
        if isinstance(loader.sampler, CurriculumSampler):
            with blaming(f"data.sampler: {type(loader.sampler).__name__}.update"):
                loader.sampler.update(batch)
        if isinstance(loader.dataset, GrowingPrompts):
            loader.dataset.on_batch_end(batch)


@dataclass(frozen=True)
class LearningData(Generic[Item]):
    """The data of a run that learns from it as it is; the validation half may be missing."""

    train_loader: StatefulLoader[Item]
    val_dataset: MapDataset[Item] | None


def build_prompt_data(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    *,
    dynamic_sampling: bool = False,
    demonstrations: bool = False,
) -> PromptData:
    """Build the loader of training prompts and the validation prompts; `data.seed` goes before `seed`.

    With `dynamic_sampling` the loader gives `data.gen_batch_size` prompts at a time (null:
    `data.train_batch_size`). With `demonstrations` each training prompt has the data's own answer with it,
    and rows without a usable one are left out, counted and shown. Raises DataError for data that cannot be
    used, ConfigError for keys that do not go together.
    """
    if config.seed is not None:
        seed = config.seed
    train = _prompt_dataset(config, tokenizer, "train", seed)
    loader = None
    if train is not None:
        if demonstrations:
            if isinstance(train, GrowingPrompts):
                raise ConfigError(
                    f"data.datagen.path={config.datagen.path} makes prompts without answers, and this run "
                    "learns from the data's own: leave data.datagen out"
                )
            if isinstance(train, PromptDataset) and train.agent_names:
                raise ConfigError(
                    f"rows name agents (agent_name {min(train.agent_names)}), and this run learns from the "
                    "data's own answers, which no agent gives: leave the column agent_name out"
                )
            train = DemonstratedPrompts(train, tokenizer, config)
        sampler = _sampler(config.sampler, train, config.shuffle, seed)
        key = "train_batch_size"
        if dynamic_sampling and config.gen_batch_size:
            key = "gen_batch_size"
        loader = StatefulLoader(
            train,
            sampler,
            getattr(config, key),
            drop_last=True,
            num_workers=config.dataloader_num_workers,
            size_key=f"data.{key}",
        )
    return PromptData(loader, _prompt_dataset(config, tokenizer, "validation", seed))


def build_sft_data(config: SFTDataConfig, tokenizer: Tokenizer, seed: int) -> LearningData[SFTRow]:
    """Build the loader of training conversations and the dataset of validation conversations.

    Raises DataError for data that cannot be used, ConfigError for keys that do not go together.
    """
    return _learning_data(config, seed, lambda rows: SFTDataset(rows, tokenizer, config))


def build_preference_data(
    config: PreferenceDataConfig, tokenizer: Tokenizer, seed: int, *, single: bool
) -> LearningData[Comparison]:
    """Build the loader of training comparisons and the dataset of validation comparisons.

    `single` and errors: `PreferenceDataset`.
    """
    return _learning_data(
        config, seed, lambda rows: PreferenceDataset(rows, tokenizer, config, single=single)
    )


def build_reward_data(
    config: RewardDataConfig, tokenizer: Tokenizer, seed: int, *, steps: bool
) -> LearningData[Any]:
    """Build the loader of training pairs, or of answers with labels of their `steps`, and the validation
    dataset. Raises what `build_sft_data` does.
    """
    if steps:
        return _learning_data(config, seed, lambda rows: StepDataset(rows, tokenizer, config))
    return _learning_data(
        config, seed, lambda rows: PreferenceDataset(rows, tokenizer, config, margin_key=config.margin_key)
    )


def _learning_data(
    config: SFTDataConfig, seed: int, build: Callable[[Rows], MapDataset[Item]]
) -> LearningData[Item]:
    train_rows = _rows(config, "train", seed)
    if train_rows is None:
        raise ConfigError(
            "data.train_files is empty and data.task.name is not set: there is nothing to train on"
        )
    train = build(train_rows)
    loader = StatefulLoader(
        train,
        _own_sampler(train, config.shuffle, seed),
        config.train_batch_size,
        drop_last=True,
        num_workers=config.dataloader_num_workers,
    )
    val_rows = _rows(config, "validation", seed)
    val = None
    if val_rows is not None:
        val = build(val_rows)
    return LearningData(loader, val)


def _prompt_dataset(
    config: DataConfig, tokenizer: Tokenizer, split: Split, seed: int
) -> MapDataset[PromptRow] | None:
    spec = join_spec(config.custom_cls.path, config.custom_cls.name, key="data.custom_cls")
    dataset: MapDataset[PromptRow]
    if spec is None:
        rows = _rows(config, split, seed)
        if rows is None:
            return None
        grows = split == "train" and config.datagen.path is not None
        dataset = (GrowingPrompts if grows else PromptDataset)(rows, tokenizer, config)
    else:
        files = _keys_of(config, split).files
        if not files:
            return None
        dataset = _custom_dataset(spec, files, tokenizer, config)
    logger.info("%s: %d prompts", split, len(dataset))
    return dataset


def _custom_dataset(
    spec: str, files: list[str], tokenizer: Tokenizer, config: DataConfig
) -> MapDataset[PromptRow]:
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
    """Read at most `*_max_samples` rows of a split from its files or its task; None without either.

    `validation_shuffle` decides the order of the validation rows; training rows stay in the data's order.
    """
    keys = _keys_of(config, split)
    task = config.task
    if task.name is None:
        if not keys.files:
            return None
        rows = load_rows(keys.files, config.cache_dir)
    else:
        if keys.files:
            raise ConfigError(
                f"data.task.name={task.name} and data.{keys.short}_files={keys.files} are both set: unset one"
            )
        if not keys.task_size:
            return None
        rows = Rows([build_task(task).rows(split, keys.task_size)], source=f"{task.name} ({split})")
    return _subset(rows, keys, split, seed)


@dataclass(frozen=True)
class _SplitKeys:
    """The keys of one split, by names that both splits share."""

    short: str
    files: list[str]
    limit: int
    shuffle: bool
    task_size: int


def _keys_of(config: DataConfig | SFTDataConfig, split: Split) -> _SplitKeys:
    if split == "train":
        return _SplitKeys(
            "train", as_list(config.train_files), config.train_max_samples, config.shuffle, config.task.size
        )
    shuffle = getattr(config, "validation_shuffle", False)
    return _SplitKeys("val", as_list(config.val_files), config.val_max_samples, shuffle, config.task.val_size)


def _subset(rows: Rows, keys: _SplitKeys, split: Split, seed: int) -> Rows:
    """The rows that `*_max_samples` leaves, drawn where the split is shuffled, else the first ones."""
    if not (0 <= keys.limit < len(rows) or (split == "validation" and keys.shuffle)):
        return rows
    if keys.limit == 0:
        raise DataError(f"data.{keys.short}_max_samples=0 leaves no rows; -1 means all")
    chosen = list(range(len(rows)))
    if keys.shuffle:
        chosen = torch.randperm(len(rows), generator=generator(seed, f"{split}_subset")).tolist()
    if keys.limit > 0:
        chosen = chosen[: keys.limit]
    if split == "train":
        chosen.sort()
    return rows.take(chosen)


def _sampler(config: SamplerConfig, dataset: MapDataset[Any], shuffle: bool, seed: int) -> Sampler:
    spec = join_spec(config.class_path, config.class_name, key="data.sampler")
    if spec is None:
        return _own_sampler(dataset, shuffle, seed)
    sampler = load_function(spec, key="data.sampler")(dataset, seed)
    missing = [name for name in ("__iter__", "__len__", "set_epoch") if not hasattr(sampler, name)]
    if missing:
        raise ConfigError(
            f"data.sampler ({spec}) has no {', '.join(missing)}; a sampler has __iter__, __len__ and "
            "set_epoch(epoch)"
        )
    return sampler  # type: ignore[no-any-return]


def _own_sampler(dataset: Sized, shuffle: bool, seed: int) -> Sampler:
    if shuffle:
        return ShuffledSampler(dataset, seed)
    return SequentialSampler(dataset)


class DemonstratedPrompts:
    """The prompts of `dataset` with an answer; item i is its PromptRow with `demonstration_token_ids`.

    Rows without a usable answer, and answers over `data.max_response_length`, are left out, counted and
    shown. Raises DataError where that leaves none.
    """

    def __init__(self, dataset: MapDataset[PromptRow], tokenizer: Tokenizer, config: DataConfig) -> None:
        self.dataset = dataset
        self._kept: list[int] = []
        self._answers = RaggedInts()
        key = config.demonstration_key
        limit = config.max_response_length
        reader = dataset.reader if isinstance(dataset, PromptDataset) else None
        self.report = RowReport(f"the training data's answers (data.demonstration_key={key})", len(dataset))

        def encode(index: int, _: int) -> list[int]:
            return encode_demonstration(tokenizer, dataset[index], config, reader=reader)

        for index, answer in self.report.encoded(range(len(dataset)), encode):
            if len(answer) > limit:
                self.report.failed(
                    index, f"the answer has {len(answer)} tokens, more than data.max_response_length={limit}"
                )
                continue
            self._kept.append(index)
            self._answers.append(answer)
        self.report.close()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> PromptRow:
        return replace(
            self.dataset[self._kept[position]], demonstration_token_ids=self._answers[position % len(self)]
        )


def encode_demonstration(
    tokenizer: Tokenizer, prompt: PromptRow, config: DataConfig, *, reader: MediaReader | None = None
) -> list[int]:
    """Return the token ids of the answer that SFT would learn, end token included.

    The column holds the answer's text, or messages that end in it and begin with the prompt's, in which
    `reader` reads pictures. Raises TypeError or ValueError where it holds neither, or other messages than the
    prompt's, or an answer that has a picture.
    """
    value = prompt.row.get(config.demonstration_key)
    if value is None:
        value = prompt.row.get(SHAREGPT)
    asked = prompt.row.get("raw_prompt")
    media = reader is not None
    if value is None:
        raise ValueError(f"no answer in the column {config.demonstration_key}: set data.demonstration_key")
    if isinstance(value, str) and not isinstance(asked, (list, tuple)):
        ids, mask = encode_pair(tokenizer, str(asked or ""), value)
    else:
        if isinstance(value, str):
            messages = [*check_messages(asked, media=media), {"role": "assistant", "content": value}]
        else:
            messages = check_messages(value, media=media)
            if messages[-1]["role"] != "assistant":
                raise ValueError(
                    f"the last message has role {messages[-1]['role']}, wanted an answer of the assistant"
                )
            if isinstance(asked, (list, tuple)) and messages[:-1] != check_messages(asked, media=media):
                raise ValueError("the messages before the answer are not the prompt of the row")
        if not any(value for name, value in messages[-1].items() if name != "role"):
            raise ValueError("the answer is empty")  # else its end token alone would be learned
        if reader is not None:
            messages, _ = reader.in_parts(messages, prompt.row)
            if any(part["type"] != "text" for part in messages[-1].get("content") or ()):
                raise ValueError("the answer has a picture or a video, and texts alone are learned")
        template = ChatTemplate(tokenizer, config.apply_chat_template_kwargs)
        ids, mask = encode_conversation(template, messages)
    start, end = last_answer(mask)
    return ids[start:end]
