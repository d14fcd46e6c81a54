"""Checks of the data files that need neither torch nor a tokenizer, made in about a second before a run.

    data.train_files, data.val_files ──schema, first rows, sources──► check_data ──► DataError, or SplitFacts

Whatever takes longer is left to the datasets, which read every row: remote files, large json files, rows
beyond the first. Nothing is checked for a user's own dataset class, which reads its files itself.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.config.data import TASKS, DataConfig, SFTDataConfig
from hybridflow.config.preference import (
    PreferenceDataConfig,
    RewardDataConfig,
    RewardModelConfig,
    items_per_row,
    learns_from_pairs,
    takes_single_answers,
)
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.data.files import (
    JSON_LINES,
    PARQUET,
    Row,
    Rows,
    as_list,
    load_rows,
    parse_line,
    refuse_no_bytes,
    unreadable_parquet,
)
from hybridflow.data.messages import check_messages, media_keys, messages_column, prompt_of
from hybridflow.data.remote import local_file
from hybridflow.data.row_schema import (
    answers_of_pair,
    complete_row,
    plain_text,
    require_comparisons,
    require_conversations,
    require_prompts,
    require_steps,
    source_of,
    steps_of,
)
from hybridflow.errors import DataError

FIRST_ROWS = 64
"""Rows of each file whose prompts are looked at."""

WHOLE_BYTES = 16 << 20
"""Largest json or jsonl file that is read whole."""

SOURCE_ROWS = 2_000_000
"""Largest parquet file, in rows, whose column of sources is read whole."""


@dataclass(frozen=True)
class SplitFacts:
    """The facts about the files of one split, as far as they are found quickly."""

    key: str
    """data.train_files, data.val_files, or data.task.name"""
    source: str
    """The files' addresses, or the task's name."""
    columns: list[str]
    sources: list[str]
    """The different data sources of the rows that were looked at."""
    without_truth: dict[str, list[str]] = field(default_factory=dict)
    """The files none of whose first rows has a ground truth, with the data sources of these rows."""


@dataclass(frozen=True)
class _Look:
    rows: Rows
    """The first rows; its `columns` are those of the whole file."""
    num_rows: int | None
    """Of the whole file; None where that is not known."""
    sources: list[str]


def check_data(config: PPOConfig | SFTConfig) -> list[SplitFacts]:
    """Look into the local data files of a run.

    Returns the facts of each split that could be read. Raises DataError for a file that cannot be read, a
    missing column, first rows that cannot be used, images or videos, or too few rows for one batch.
    """
    data = config.data
    if data.task.name:
        if data.task.name not in TASKS and not data.task.name.startswith("reasoning_gym:"):
            return []  # nothing is known of a user's own task
        columns = ["data_source", "prompt", "reward_model", "extra_info"]
        return [SplitFacts("data.task.name", data.task.name, columns, [data.task.name])]
    if isinstance(data, DataConfig) and data.custom_cls.path:
        return []
    found = []
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        looks = [look for address in as_list(files) if address and (look := _look(address, data))]
        if not looks or len(looks) < len(as_list(files)):
            continue
        source = ", ".join(look.rows.source for look in looks)
        columns = list(dict.fromkeys(name for look in looks for name in look.rows.columns))
        whole = Rows([[dict.fromkeys(columns)]], source)
        if isinstance(data, DataConfig):
            require_prompts(whole, data)
        elif isinstance(config, RewardModelConfig) and not learns_from_pairs(config):
            require_steps(whole, config.data)
        elif isinstance(data, PreferenceDataConfig):
            require_comparisons(whole, data, single=takes_single_answers(config))
        else:
            require_conversations(whole, data)
        without_truth = {}
        for look in looks:
            why, read = _unread_media(config)
            look.rows.refuse_media(why, named=media_keys(config.data), read=read)
            _check_first_rows(look.rows, data)
            if isinstance(data, DataConfig) and not _has_truth(look.rows, data):
                without_truth[look.rows.source] = _sources(look.rows[:FIRST_ROWS], data)
        if key == "data.train_files":
            _check_number(source, looks, config)
        sources = list(dict.fromkeys(name for look in looks for name in look.sources))
        found.append(SplitFacts(key, source, columns, sources, without_truth))
    return found


def _unread_media(config: PPOConfig | SFTConfig) -> tuple[str, bool]:
    """Return what leaves pictures and videos out, and whether those in columns that keys name are read.

    A hub's model, or one whose folder cannot be read, may read them: the datasets know.
    """
    if isinstance(config, PPOConfig):
        path = config.actor_rollout_ref.model.path
    else:
        path = config.model.path
    try:
        shape = json.loads((Path(path or "").expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        shape = {"vision_config": {}}
    if isinstance(shape, dict) and "vision_config" not in shape:
        return f"the model {path} reads text only", False
    if isinstance(config.data, PreferenceDataConfig):
        return "answers are compared by their text alone", False
    return "no key names it", True


def _look(address: str, data: DataConfig | SFTDataConfig) -> _Look | None:
    """The first rows of a file and what is known of the rest; None for one that would take long to read."""
    if "://" in address:
        return None
    path = local_file(address)
    refuse_no_bytes(address, path)
    suffix = Path(address).suffix.lower()
    if suffix in PARQUET:
        return _look_into_parquet(address, path, data)
    if path.stat().st_size <= WHOLE_BYTES:
        rows = load_rows(address)
        return _Look(rows, len(rows), _sources(rows, data))
    if suffix in JSON_LINES:
        first = list(itertools.islice(_lines(address, path), FIRST_ROWS))
        rows = Rows([first], address)
        return _Look(rows, None, _sources(rows, data))
    return None


def _look_into_parquet(address: str, path: Path, data: DataConfig | SFTDataConfig) -> _Look:
    key = getattr(data, "reward_fn_key", "")
    with unreadable_parquet(address), pq.ParquetFile(path) as file:
        num_rows = file.metadata.num_rows
        batches = list(itertools.islice(file.iter_batches(FIRST_ROWS), 1))
        first = pa.Table.from_batches(batches, file.schema_arrow)
        column = first
        sources = first
        nested = key in first.column_names and pa.types.is_nested(first.schema.field(key).type)
        if key in first.column_names and num_rows <= SOURCE_ROWS and not nested:
            column = file.read(columns=[key])
            sources = pa.table({key: column.column(key).unique()})
    if not num_rows:
        raise DataError(f"{address} is empty: it has no rows")
    try:
        named = _sources(Rows([sources], address), data)
    except DataError:
        list(Rows([column], address))  # it raises with the number of the row in the file
        raise
    return _Look(Rows([first], address), num_rows, named)


def _lines(address: str, path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_line(address, number, line.removeprefix(codecs.BOM_UTF8))


def _sources(rows: Iterable[Row], data: DataConfig | SFTDataConfig) -> list[str]:
    """The different data sources of the rows, as `complete_row` names them."""
    if isinstance(data, SFTDataConfig):
        return []
    return list(dict.fromkeys(source_of(row, data) for row in rows))


def _check_first_rows(rows: Rows, data: DataConfig | SFTDataConfig) -> None:
    """Raise DataError where none of the first rows can be used; the dataset counts single bad ones."""
    reasons = []
    for index, row in enumerate(rows[:FIRST_ROWS]):
        try:
            if isinstance(data, DataConfig):
                complete_row(row, index, data)
            else:
                _check_conversation(row, rows.columns, data)
            return
        except KeyError as error:
            reasons.append(f"no column {error}")
        except (TypeError, ValueError) as error:
            reasons.append(str(error))
    if reasons:
        raise DataError(
            f"{rows.source}: none of the first {len(reasons)} rows can be used; row 0: {reasons[0]}"
        )


def _has_truth(rows: Rows, data: DataConfig) -> bool:
    for index, row in enumerate(rows[:FIRST_ROWS]):
        try:
            complete = complete_row(row, index, data)
        except (KeyError, TypeError, ValueError):  # the dataset leaves it out
            continue
        if complete["reward_model"].get("ground_truth") is not None:
            return True
    return False


def _check_conversation(row: Row, columns: list[str], data: SFTDataConfig) -> None:
    if isinstance(data, RewardDataConfig) and data.chosen_key not in columns:
        steps_of(row, data)
        return
    if isinstance(data, PreferenceDataConfig) and data.chosen_key in columns:
        answers_of_pair(row, data)
        return
    if data.text_key is not None:
        plain_text(row, data.text_key)
        return
    column = messages_column(columns, data.messages_key, data.prompt_key, data.response_key)
    if column is not None:
        check_messages(row[column], media=True)
        return
    if row[data.prompt_key] != "":
        prompt_of(row[data.prompt_key], wrap=data.wrap_prompts, media=True)
    response = row[data.response_key]
    if not isinstance(response, str):
        raise TypeError(f"{data.response_key} is {type(response).__name__}, wanted a string")


def _check_number(source: str, looks: list[_Look], config: PPOConfig | SFTConfig) -> None:
    """Raise DataError where the training files hold fewer items than one batch, before any is left out."""
    data = config.data
    if isinstance(data, DataConfig) and data.sampler.class_path:
        return
    numbers = [
        look.num_rows * items_per_row(config, look.rows.columns)
        for look in looks
        if look.num_rows is not None
    ]
    if len(numbers) < len(looks):
        return
    key = "train_batch_size"
    if isinstance(config, PPOConfig) and config.algorithm.filter_groups.enable and config.data.gen_batch_size:
        key = "gen_batch_size"
    size = getattr(data, key)
    total = sum(numbers)
    items = "answers" if takes_single_answers(config) else "rows"
    if total < size:
        raise DataError(
            f"{source}: {total} {items}, fewer than data.{key}={size}: set data.{key}={total} or less, or "
            "add data"
        )
