"""Data files: addresses in, one table of rows out.

train_files ──local_file──► parquet: an Arrow table, rows made on access · json, jsonl: a list of objects ──►
Rows
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.data.remote import local_file
from hybridflow.errors import DataError

Row = dict[str, Any]

READ_ROWS = 1024
"""Arrow rows turned into Python objects together when a table is read through."""


class Rows(Sequence[Row]):
    """Rows of one or more files as one sequence; a row is a new dict at each access, so a caller may change
    it.

    `columns` are the names that any of the files has; a row holds those of its own file. `source` says where
    the rows came from.
    """

    def __init__(self, parts: Sequence[pa.Table | Sequence[Mapping[str, Any]]], source: str = "rows") -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(itertools.accumulate(len(part) for part in self._parts))
        self.source = source
        self.columns = list(dict.fromkeys(name for part in parts for name in _column_names(part)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        which = bisect.bisect_right(self._ends, index)
        part, at = self._parts[which], index - (self._ends[which - 1] if which else 0)
        return part.slice(at, 1).to_pylist()[0] if isinstance(part, pa.Table) else dict(part[at])

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            if isinstance(part, pa.Table):
                for start in range(0, len(part), READ_ROWS):
                    yield from part.slice(start, READ_ROWS).to_pylist()
            else:
                yield from (dict(row) for row in part)

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows at `indices`, in that order."""
        parts: list[Any] = []
        for which, group in itertools.groupby(
            indices, key=lambda index: bisect.bisect_right(self._ends, index)
        ):
            part, start = self._parts[which], self._ends[which - 1] if which else 0
            local = [index - start for index in group]
            parts.append(part.take(local) if isinstance(part, pa.Table) else [part[i] for i in local])
        return Rows(parts, self.source)

    def require(self, *columns: str, hint: str = "") -> None:
        """Raise DataError where a column is missing, naming those present."""
        missing = [name for name in columns if name not in self.columns]
        if missing:
            present = ", ".join(self.columns) or "none"
            raise DataError(
                f"{self.source} has no column {', '.join(missing)}; its columns: {present}"
                + (f"; {hint}" if hint else "")
            )


def _column_names(part: pa.Table | Sequence[Mapping[str, Any]]) -> Iterable[str]:
    return (
        part.column_names
        if isinstance(part, pa.Table)
        else dict.fromkeys(name for row in part for name in row)
    )


def as_list(files: str | Sequence[str]) -> list[str]:
    """One address or several as a list."""
    return [files] if isinstance(files, (str, Path)) else [str(file) for file in files]


def load_rows(files: str | Sequence[str], cache_dir: str | Path | None = None) -> Rows:
    """The rows of parquet, json (a list of objects) and jsonl files, in the order given.

    Raises DataError for a missing, empty or malformed file, naming it (and the line).
    """
    addresses = as_list(files)
    if not addresses:
        raise DataError("no data files given; set data.train_files (or data.task.name for a procedural task)")
    parts = []
    for address in addresses:
        part = _load_file(address, local_file(address, cache_dir))
        if not len(part):
            raise DataError(f"{address} is empty: it has no rows")
        parts.append(part)
    return Rows(parts, source=", ".join(addresses))


def count_rows(files: str | Sequence[str]) -> int | None:
    """How many rows the files hold, from a parquet file's footer alone; None where a file would have to be
    fetched first.

    Raises DataError as `load_rows` does.
    """
    addresses = as_list(files)
    if any("://" in address for address in addresses):
        return None
    return sum(_count(address, local_file(address)) for address in addresses)


def _count(address: str, path: Path) -> int:
    if Path(address).suffix.lower() in (".parquet", ".pq"):
        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{address} is no readable parquet file: {error}") from error
    return len(_load_file(address, path))


def _load_file(address: str, path: Path) -> pa.Table | list[Row]:
    suffix = Path(address).suffix.lower()
    if path.stat().st_size == 0:
        raise DataError(f"{address} is empty: it has 0 bytes")
    if suffix in (".parquet", ".pq"):
        try:
            return pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{address} is no readable parquet file: {error}") from error
    if suffix in (".jsonl", ".ndjson"):
        return _read_json_lines(address, path)
    if suffix == ".json":
        return _read_json(address, path)
    raise DataError(f"{address}: got the ending {suffix or '(none)'!r}, wanted .parquet, .json or .jsonl")


def _read_json_lines(address: str, path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_text(address, path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{address}, line {number}: not JSON ({error.msg} at column {error.colno})"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{address}, line {number}: got {type(row).__name__}, wanted an object {{...}} on each line"
            )
        rows.append(row)
    return rows


def _read_json(address: str, path: Path) -> list[Row]:
    text = _text(address, path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line under the name .json: common, and clear enough
            return _read_json_lines(address, path)
        raise DataError(
            f"{address}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})"
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{address}: got {type(rows).__name__}, wanted a list of objects [{{...}}, ...] (or .jsonl: one "
            "a line)"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{address}, entry {number}: got {type(row).__name__}, wanted an object {{...}}")
    return rows


def _text(address: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{address} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{address} is not UTF-8 text: {error.reason} at byte {error.start}") from error
