"""The row store: columns by row and name, where they were made, until whoever reads them asks for them.

    put(rows, columns)        ──► a shard of the driver's         ┐ ──► get(rows, names) on the driver
    keep(rows, columns, part) ──► a worker's result, as a shard   ┘ ──► by_reference(batch) for a worker
A row is known by its `row_id`. A column of a row does not change while it is stored: what is computed anew,
under other weights for example, is not put here. The same index serves all backends. They differ in where a
shard is: in this process (`in_memory`), or in Ray's object store, on the node of the process that made it.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from hybridflow.controller.future import Part
from hybridflow.controller.read_only import TensorVersions, isolate
from hybridflow.controller.stored_rows import STORED_AT, Places, StoredRows
from hybridflow.errors import WorkerLost
from hybridflow.protocol import BatchError, DataProto
from hybridflow.protocol.joining import widths_of


def in_memory(columns: DataProto) -> Part:
    """Return a shard in this process, which shares the tensors of `columns`."""
    part: Part = concurrent.futures.Future()
    part.set_result(isolate(columns))
    return part


class RowStore:
    """Columns by row and name. Any thread may call it; `store` makes a shard of a batch."""

    def __init__(self, store: Callable[[DataProto], Part]) -> None:
        self._store = store
        self._lock = threading.Lock()
        # by column and row: the shard, the row's number there, and the column's name there
        self._places: dict[str, dict[int, tuple[Part, int, str]]] = {}
        self._widths: tuple[int, int] | None = None
        self._seen: list[tuple[frozenset[int], TensorVersions]] = []

    def put(self, rows: Sequence[int], columns: DataProto) -> None:
        """Store columns of the rows with these ids; what was stored of them under the same names is replaced.

        Raises BatchError where there is not one id for each row, or an id is there twice.
        """
        if len(rows) != len(columns) or len(set(rows)) < len(rows):
            raise BatchError(f"{len(columns)} rows cannot be stored under {len(set(rows))} different ids")
        self.keep(rows, columns.names(), self._store(columns))
        self.watch(rows, columns)

    def keep(self, rows: Sequence[int], names: Sequence[str], part: Part) -> None:
        """Store what `part` holds or will hold where it is: these columns, of the rows with these ids."""
        with self._lock:
            for name in names:
                places = self._places.setdefault(name, {})
                places.update((row, (part, number, name)) for number, row in enumerate(rows))

    def keep_collected(self, batch: DataProto, names: Sequence[str]) -> None:
        """Store those of these columns that the rows of `batch` have where its `stored_at` says.

        They are read with the widths of this batch.
        """
        rows = batch.batch["row_id"].tolist()
        places = list(batch.non_tensor_batch[STORED_AT])
        with self._lock:
            self._widths = widths_of(batch)
            for row, at in zip(rows, places, strict=True):
                for name in names:
                    if name in at.names:
                        self._places.setdefault(name, {})[row] = (at.shard, at.row, name)
        self.watch(rows, batch.select([name for name in names if name in batch], []))

    def alias(self, batch: DataProto, name: str, column: str) -> None:
        """Store `name` of the rows of `batch` as the same values as their `column`, where that is stored."""
        if column in self.names(batch):
            with self._lock:
                places = self._places[column]
                own = self._places.setdefault(name, {})
                own.update((row, places[row]) for row in batch.batch["row_id"].tolist())

    def watch(self, rows: Sequence[int], columns: DataProto) -> None:
        """Notice from now on where the driver writes into its own copy of stored columns of these rows."""
        with self._lock:
            self._seen.append((frozenset(rows), TensorVersions(columns)))

    def names(self, batch: DataProto) -> frozenset[str]:
        """Return the names of the columns that are stored for every row of `batch`."""
        if "row_id" not in batch:
            return frozenset()
        rows = batch.batch["row_id"].tolist()
        with self._lock:
            stored = [name for name, places in self._places.items() if all(row in places for row in rows)]
        return frozenset(stored)

    def get(self, rows: Sequence[int], names: Sequence[str]) -> DataProto:
        """Return columns of rows, in the order of `rows`.

        Raises BatchError for a row that has no such column, and WorkerLost where it was lost with the node
        that held it; the store then no longer lists what was lost.
        """
        places, parts = self._find(rows, names)
        missing = [name for name in names if name not in places]
        if missing:
            have = self._places.get(missing[0], {})
            row = next(row for row in rows if row not in have)
            raise BatchError(f"row {row} has no column {missing[0]!r} in the row store")
        shards = []
        for part in parts:
            try:
                shards.append(part.result())
            except WorkerLost:
                self._drop(part)
                raise
        return StoredRows(DataProto(), places, tuple(shards), self._widths).gather()

    def by_reference(self, batch: DataProto, further: Sequence[str] = ()) -> DataProto | StoredRows:
        """Return the rows of `batch` for another process; columns that are stored for all of them are
        replaced by their places. The columns `further` are added as far as they are stored.

        Raises AssertionError where a column was written in place since it was stored.
        """
        if "row_id" not in batch:
            return batch
        written = ", ".join(name for _, seen in self._seen for name in seen.changed())
        assert not written, f"{written} was written in place, and the row store has it: write to a clone"
        added = [name for name in further if name not in batch]
        if len(batch):
            added += batch.names()
        places, parts = self._find(batch.batch["row_id"].tolist(), added)
        if not places:
            return batch
        objects = [name for name in batch.non_tensor_batch if name not in places]
        tensors = [name for name in batch.names() if name not in {*places, *batch.non_tensor_batch}]
        return StoredRows(batch.select(tensors, objects), places, parts, self._widths)

    def _find(self, rows: Sequence[int], names: Sequence[str]) -> tuple[dict[str, Places], tuple[Part, ...]]:
        """Return the places of those columns that are stored for all of these rows, and their shards.

        No rows have the places of any other row, which show dtype and width.
        """
        numbers: dict[Part, int] = {}
        places: dict[str, Places] = {}
        with self._lock:
            for name in names:
                have = self._places.get(name, {})
                if not have or any(row not in have for row in rows):
                    continue
                found = [have[row] for row in rows]
                holders = found or [next(iter(have.values()))]
                shards = [numbers.setdefault(part, len(numbers)) for part, _, _ in holders]
                columns = dict(zip(shards, (column for _, _, column in holders), strict=True))
                places[name] = Places(shards, [number for _, number, _ in found], columns)
        return places, tuple(numbers)

    def list(self) -> Mapping[int, frozenset[str]]:
        """Return the stored columns of each row.

        What a call has not yet returned, or was lost with its process, is not there.
        """
        listed: dict[int, set[str]] = {}
        with self._lock:
            for name, places in self._places.items():
                for row, (part, _, _) in places.items():
                    if part.done() and part.exception() is None:
                        listed.setdefault(row, set()).add(name)
        return {row: frozenset(names) for row, names in listed.items()}

    def clear(self, rows: Sequence[int] | None = None) -> None:
        """Forget these rows, or all. A shard is freed with its last row."""
        with self._lock:
            if rows is None:
                self._places.clear()
                self._widths = None
                self._seen.clear()
                return
            gone = frozenset(rows)
            self._seen = [seen for seen in self._seen if not seen[0] <= gone]
            for places in self._places.values():
                for row in gone:
                    places.pop(row, None)

    def keep_only(self, rows: Collection[int], names: Collection[str]) -> None:
        """Forget all but these columns of these rows, which later steps read again.

        In-place writes into what is left are no longer noticed: the driver has handed it over.
        """
        kept = set(rows)
        with self._lock:
            self._seen.clear()
            for name, places in list(self._places.items()):
                left = {row: place for row, place in places.items() if row in kept and name in names}
                if left:
                    self._places[name] = left
                else:
                    del self._places[name]

    def _drop(self, part: Part) -> None:
        with self._lock:
            for name, places in self._places.items():
                self._places[name] = {row: place for row, place in places.items() if place[0] is not part}
