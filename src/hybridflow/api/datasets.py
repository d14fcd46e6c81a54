"""Data of a program as the files that a run reads.

path, list of paths ──────────────────────────────────────► as they are
list of dicts or texts, datasets.Dataset, DataFrame ──rows──► RUN/data/train.jsonl
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError

Dataset = str | os.PathLike[str] | Sequence[Any]
"""Paths, rows, or an object with rows such as a `datasets.Dataset` or a pandas DataFrame."""

WANTED = (
    "wanted a list of dicts or of texts, a datasets.Dataset, a pandas DataFrame, or paths of parquet, json "
    "or jsonl files"
)


@dataclass(frozen=True)
class Rows:
    """Rows that are in memory, and the name of the argument that they came by."""

    argument: str
    rows: Sequence[Any]

    def write(self, file: Path) -> None:
        """Write the rows as JSON lines, whole or not at all. Raises DataError for one that is no JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as lines:
            for number, row in enumerate(self.rows):
                lines.write(self._line(number, row))
        os.replace(partial, file)

    def _line(self, number: int, row: Any) -> str:
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise DataError(f"{self.argument}, row {number}: got {type(row).__name__}, {WANTED}")
        try:
            line = json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n"
            line.encode("utf-8")  # half of a surrogate pair has no bytes
            return line
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.argument}, row {number}: {error}; wanted texts, numbers, lists and dicts"
            ) from error


def files_or_rows(dataset: Dataset, argument: str) -> list[str] | Rows:
    """Return the paths, or the rows that are to be written. Raises DataError for what is neither."""
    if isinstance(dataset, str | os.PathLike):
        return [os.fspath(dataset)]
    frame: Any = dataset
    if hasattr(frame, "iloc"):  # a pandas DataFrame, which iterates over its columns and has NaN for no value
        dataset = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__") or not isinstance(dataset, Iterable):
        raise DataError(f"{argument}: got {type(dataset).__name__}, {WANTED}")
    if not len(dataset):
        raise DataError(f"{argument} is empty: it has no rows")
    if all(isinstance(row, os.PathLike) or _is_file(row) for row in dataset):
        return [os.fspath(row) for row in dataset]
    return Rows(argument, dataset)


def _is_file(row: Any) -> bool:
    return isinstance(row, str) and row.endswith((".parquet", ".pq", ".json", ".jsonl", ".ndjson"))


def _plain(value: Any) -> Any:
    """Return an array or a number of a library as JSON has them; TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON")
