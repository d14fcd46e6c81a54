"""Data files: addresses in, one table of rows out; and lists of token ids in four bytes a token.

train_files ──local_file──► parquet: an Arrow table, rows made on access ─┐
                          └► json, jsonl: a list of objects ──────────────┴─► Rows
"""

from __future__ import annotations

import bisect
import codecs
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, overload

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.data.messages import MEDIA, media_message, without_fills
from hybridflow.data.remote import local_file
from hybridflow.errors import DataError

Row = dict[str, Any]

_UNREADABLE = (ValueError, ArithmeticError, pa.ArrowException)
"""What Arrow raises on making Python objects: text that is not UTF-8, times that Python's own do not hold."""

_BYTE = re.compile("[\udc80-\udcff]")
"""What Python makes of a byte that is not UTF-8, where it is set to keep it."""

PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".ndjson")

READ_ROWS = 1024
"""Arrow rows turned into Python objects together when a table is read through."""


class Rows(Sequence[Row]):
    """Rows of one or more files as one sequence; a row is a new dict, which a caller may change.

    `columns` are the names that any of the files has; a row holds those of its own file. `source` says where
    the rows came from. Raises DataError for a row whose values cannot be read.
    """

    def __init__(self, parts: Sequence[pa.Table | Sequence[Mapping[str, Any]]], source: str = "rows") -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(itertools.accumulate(len(part) for part in self._parts))
        self.source = source
        self.columns = list(dict.fromkeys(name for part in parts for name in _column_names(part)))

    def plus(self, part: Sequence[Mapping[str, Any]]) -> Rows:
        """Return these rows with those of `part` behind them."""
        return Rows([*self._parts, part], self.source)

    def __len__(self) -> int:
        return sum(self._ends[-1:])

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
        which, start = self._locate(index)
        part = self._parts[which]
        if not isinstance(part, pa.Table):
            return dict(part[index - start])
        return self._read(part, index - start, 1, index)[0]

    def __iter__(self) -> Iterator[Row]:
        first = 0
        for part in self._parts:
            if isinstance(part, pa.Table):
                for start in range(0, len(part), READ_ROWS):
                    yield from self._read(part, start, READ_ROWS, first + start)
            else:
                yield from (dict(row) for row in part)
            first += len(part)

    def _locate(self, index: int) -> tuple[int, int]:
        """The part that holds row `index`, and the number of its first row."""
        which = bisect.bisect_right(self._ends, index)
        return which, sum(self._ends[which - 1 : which])

    def _read(self, table: pa.Table, start: int, count: int, number: int) -> list[Row]:
        """Rows of an Arrow table; `number` is the number of the first of them in this sequence."""
        try:
            rows: list[Row] = table.slice(start, count).to_pylist()
            return [{name: without_fills(value, name) for name, value in row.items()} for row in rows]
        except _UNREADABLE as error:
            for place in range(start, min(start + count, len(table))):
                if reason := _why_unreadable(table, place):
                    raise DataError(f"{self.source}, row {number + place - start}: {reason}") from error
            raise

    def take(self, indices: Sequence[int]) -> Rows:
        """The rows at `indices`, in that order."""
        parts: list[Any] = []
        for (which, start), group in itertools.groupby(indices, key=self._locate):
            part = self._parts[which]
            local = [index - start for index in group]
            if isinstance(part, pa.Table):
                parts.append(part.take(local))
            else:
                parts.append([part[place] for place in local])
        return Rows(parts, self.source)

    def refuse_media(self, why: str, *, named: Sequence[str] = (), read: bool = False) -> None:
        """Raise DataError where a row has images or videos that nothing reads: they would be left out without
        a word. `named` are the columns that keys name for them, which are read where `read` says so; `why`
        says what leaves the others out.
        """
        for column in dict.fromkeys((*MEDIA, *named)):
            if column in self.columns and not (read and column in named):
                row = self._first_filled(column)
                if row is not None:
                    raise DataError(media_message(self.source, column, row, why))

    def _first_filled(self, column: str) -> int | None:
        """The first row whose value in `column` is neither null nor empty."""
        first = 0
        for part in self._parts:
            if isinstance(part, pa.Table):
                place = first_filled(part, column)
            else:
                place = next((number for number, row in enumerate(part) if row.get(column)), None)
            if place is not None:
                return first + place
            first += len(part)
        return None

    def require(self, *columns: str, hint: str = "") -> None:
        """Raise DataError where a column is missing, naming those present."""
        missing = [name for name in columns if name not in self.columns]
        if missing:
            present = ", ".join(self.columns) or "none"
            text = f"{self.source} has no column {', '.join(missing)}; its columns: {present}"
            raise DataError("; ".join(filter(None, [text, hint])))


def _column_names(part: pa.Table | Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if isinstance(part, pa.Table):
        return cast("list[str]", part.column_names)
    return dict.fromkeys(name for row in part for name in row)


def first_filled(table: pa.Table, column: str) -> int | None:
    """The first row of an Arrow table whose value in `column` is neither null nor empty, or None."""
    if column not in table.column_names:
        return None
    import pyarrow.compute as pc  # here: it takes longer to import than pyarrow itself

    values = table.column(column)
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        filled = pc.greater(pc.fill_null(pc.list_value_length(values), 0), 0)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        filled = pc.greater(pc.fill_null(pc.binary_length(values), 0), 0)
    else:
        filled = pc.is_valid(values)
    place = pc.index(filled, True).as_py()
    if place < 0:
        return None
    return int(place)


def _why_unreadable(table: pa.Table, place: int) -> str:
    """The column and the error of the row at `place`; empty where it can be read."""
    for name in table.column_names:
        try:
            table.column(name).slice(place, 1).to_pylist()
        except UnicodeDecodeError as error:
            return (
                f"column {name} holds text that is not UTF-8 ({error.reason} at byte {error.start}): the "
                "file is damaged, write it again"
            )
        except _UNREADABLE as error:
            return f"column {name} cannot be read ({type(error).__name__}: {error})"
    return ""


def as_rows(rows: Rows | Sequence[Row]) -> Rows:
    """Return rows from anywhere as Rows."""
    if isinstance(rows, Rows):
        return rows
    return Rows([rows])


def as_list(files: str | Sequence[str]) -> list[str]:
    """Return one address or several as a list."""
    if isinstance(files, (str, Path)):
        return [str(files)]
    return [str(file) for file in files]


def load_rows(files: str | Sequence[str], cache_dir: str | Path | None = None) -> Rows:
    """Read the rows of parquet, json (a list of objects) and jsonl files, in the order given.

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
    """Count the rows of the files, of parquet by its footer alone; None where one would have to be fetched.

    Raises DataError as `load_rows` does.
    """
    addresses = as_list(files)
    if any("://" in address for address in addresses):
        return None
    return sum(_count(address, local_file(address)) for address in addresses)


def _count(address: str, path: Path) -> int:
    if Path(address).suffix.lower() in PARQUET:
        with unreadable_parquet(address):
            return int(pq.read_metadata(path).num_rows)
    return len(_load_file(address, path))


def refuse_no_bytes(address: str, path: Path) -> None:
    """Raise DataError for a file without a byte."""
    if path.stat().st_size == 0:
        raise DataError(f"{address} is empty: it has 0 bytes")


def _load_file(address: str, path: Path) -> pa.Table | list[Row]:
    suffix = Path(address).suffix.lower()
    refuse_no_bytes(address, path)
    if suffix in PARQUET:
        return read_parquet(address, path)
    if suffix in JSON_LINES:
        return _read_json_lines(address, path)
    if suffix == ".json":
        return _read_json(address, path)
    raise DataError(f"{address}: got the ending {suffix or '(none)'!r}, wanted .parquet, .json or .jsonl")


@contextmanager
def unreadable_parquet(address: str) -> Iterator[None]:
    """Turn what pyarrow raises on a damaged file into a DataError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{address}: the name of a column or of a field is not UTF-8 ({error.reason} at byte "
            f"{error.start}): the file is damaged, write it again"
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{address} is no readable parquet file: {error}") from error


def read_parquet(address: str, path: Path) -> pa.Table:
    """A parquet file as an Arrow table. Raises DataError where its text, or a name, is not UTF-8."""
    with unreadable_parquet(address):
        table = pq.read_table(path)
        for field in table.schema:
            _decode_names(field)
    try:
        table.validate(full=True)
    except pa.ArrowException:
        for _ in Rows([table], source=address):
            pass  # reading it all raises the DataError that names the row, unless Python is content with it
    return table


def _decode_names(field: pa.Field) -> None:
    """Raise UnicodeDecodeError where the name of a field, or of one below it, is not UTF-8."""
    str(field.name)
    kind = field.type
    inner = []
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        inner = [kind.field(number) for number in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        inner = [kind.key_field, kind.item_field]
    elif pa.types.is_nested(kind):
        inner = [kind.value_field]
    for each in inner:
        _decode_names(each)


def _read_json_lines(address: str, path: Path) -> list[Row]:
    lines = enumerate(_bytes(address, path).split(b"\n"), start=1)
    return [parse_line(address, number, line) for number, line in lines if line.strip()]


def parse_line(address: str, number: int, line: bytes) -> Row:
    """The object in line `number` of a jsonl file. Raises DataError for a line that is none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{address}, line {number}{_in_column(line)}: {_not_utf8(error)}") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{address}, line {number}: not JSON ({error.msg} at column {error.colno})"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{address}, line {number}: {_json_reason(error)}") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{address}, line {number}: got {type(row).__name__}, wanted an object {{...}} on each line"
        )
    return row


def _in_column(line: bytes) -> str:
    """The column of a line that holds bytes which are not UTF-8, in words; empty where it is not known."""
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (RecursionError, ValueError):
        return ""
    columns = row.items() if isinstance(row, dict) else ()
    found = (name for name, value in columns if _BYTE.search(name + json.dumps(value, ensure_ascii=False)))
    return "".join(f", column {ascii(name)[1:-1]}" for name in itertools.islice(found, 1))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"the text is not UTF-8 ({error.reason} at byte {error.start}): write it again in UTF-8"


def _json_reason(error: Exception) -> str:
    """In words: valid JSON that Python's parser does not take."""
    if isinstance(error, RecursionError):
        return "lists or objects nest too deeply to be read"
    return f"a number cannot be read ({str(error).partition(';')[0]})"


def _read_json(address: str, path: Path) -> list[Row]:
    content = _bytes(address, path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{address}, line {line}: {_not_utf8(error)}") from error
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line under the name .json: common, and clear enough
            return _read_json_lines(address, path)
        raise DataError(
            f"{address}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{address}, entry {_bad_entry(text)}: {_json_reason(error)}") from error
    if not isinstance(rows, list):
        raise DataError(
            f"{address}: got {type(rows).__name__}, wanted a list of objects [{{...}}, ...] (or .jsonl: one "
            "a line)"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{address}, entry {number}: got {type(row).__name__}, wanted an object {{...}}")
    return rows


def _bad_entry(text: str) -> int:
    """The number of the first entry of a JSON list that Python's parser does not take."""
    decoder = json.JSONDecoder()
    place = text.find("[") + 1
    number = 0
    while place < len(text):
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        try:
            _, place = decoder.raw_decode(text, place)
        except (RecursionError, ValueError):
            break
        number += 1
    return number


def _bytes(address: str, path: Path) -> bytes:
    """The bytes of a file, without the mark that some programs put before UTF-8."""
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f"{address} cannot be read: {error}") from error


class RaggedInts:
    """An append-only list of lists of int32, stored flat with offsets."""

    def __init__(self) -> None:
        self._values = array("i")
        self._offsets = array("q", [0])

    def append(self, values: Sequence[int]) -> None:
        """Add one list."""
        self._values.extend(values)
        self._offsets.append(len(self._values))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"list {index} of {len(self)}")
        return self._values[self._offsets[index] : self._offsets[index + 1]].tolist()

    def content(self) -> bytes:
        """Return bytes that are equal for equal lists, for a digest."""
        return self._offsets.tobytes() + self._values.tobytes()
