"""Rows on their way to a reader: some columns by value, others by their places in a row store.

RowStore.by_reference ──► StoredRows ──to the reader, each shard by reference──► gather ──► DataProto
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import fit_column, widths_of

PAD = "pad_token_id"
"""The entry of `meta_info` of a shard whose rows may be of other widths than those they are read with."""


@dataclass(frozen=True, eq=False)
class StoredAt:
    """The place of the columns of a row which are in a shard, and not in the batch that has the row.

    A batch has one for each row in the object column `stored_at`, so a shard lives as long as one of its
    rows.
    """

    shard: Any
    """The `Part` of the shard."""
    row: int
    """The number of the row in it."""
    names: tuple[str, ...]
    """The columns of the shard."""


STORED_AT = "stored_at"
"""The object column of the `StoredAt` of each row."""


@dataclass(frozen=True)
class Places:
    """The place of each row of a column."""

    shards: Sequence[int]
    """The shard of each row, as an index into `StoredRows.shards`; for no rows one that has the column."""
    rows: Sequence[int]
    """The number of each row in its shard."""
    columns: Mapping[int, str]
    """The name of the column in each of these shards."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of which some columns are in a store."""

    values: DataProto
    """The columns that travel by value."""
    places: Mapping[str, Places]
    """The places of each column that is in the store."""
    shards: tuple[Any, ...]
    """A `Part` for each shard until it has arrived, then its DataProto."""
    widths: tuple[int, int] | None = None
    """Widths (P, R) of prompts and responses to which shards that have masks are fitted; None: all have the
    same.
    """

    def gather(self) -> DataProto:
        """Return all columns as one batch, once the shards are here.

        A column that is a whole shard, in its order, is returned as it is, without a copy.
        """
        tensors: dict[str, Tensor] = {}
        objects: dict[str, Any] = {}
        for name, places in self.places.items():
            columns = {
                shard: _column(self.shards[shard], own, self.widths) for shard, own in places.columns.items()
            }
            if any(isinstance(column, Tensor) for column in columns.values()):
                tensors[name] = _rows_of_tensors(columns, places)
            else:
                objects[name] = _rows_of_objects(columns, places)
        return self.values | DataProto.from_dict(tensors, objects)


def with_stored(rows: DataProto) -> DataProto:
    """Return the rows with all columns: those of their shards too, and without `stored_at`."""
    if STORED_AT not in rows:
        return rows
    found = list(rows.non_tensor_batch[STORED_AT])
    numbers = {shard: number for number, shard in enumerate(dict.fromkeys(at.shard for at in found))}
    of_rows = [numbers[at.shard] for at in found]
    places = {
        name: Places(of_rows, [at.row for at in found], dict.fromkeys(of_rows, name))
        for name in found[0].names
    }
    tensors = [name for name in map(str, rows.batch.keys()) if name not in places]
    objects = [name for name in rows.non_tensor_batch if name != STORED_AT]
    shards = tuple(shard.result() for shard in numbers)
    return StoredRows(rows.select(tensors, objects), places, shards, widths_of(rows)).gather()


def _column(shard: DataProto, name: str, widths: tuple[int, int] | None) -> Any:
    if name in shard.non_tensor_batch:
        return shard.non_tensor_batch[name]
    column: Tensor = shard.batch[name]
    if widths is None or PAD not in shard.meta_info:
        return column
    return fit_column(name, column, widths_of(shard), widths, shard.meta_info[PAD])


def _rows_of_tensors(columns: Mapping[int, Tensor], places: Places) -> Tensor:
    first = next(iter(columns.values()))
    rows = torch.tensor(places.rows, dtype=torch.int64)
    if len(columns) == 1:
        if len(rows) == len(first) and torch.equal(rows, torch.arange(len(rows))):
            return first
        return first[rows]
    shards = torch.tensor(places.shards)
    found = first.new_empty((len(rows), *first.shape[1:]))
    for shard, column in columns.items():
        here = shards == shard
        found[here] = column[rows[here]]
    return found


def _rows_of_objects(columns: Mapping[int, Any], places: Places) -> Any:
    found = np.empty(len(places.rows), dtype=object)
    for index, row in enumerate(places.rows):
        found[index] = columns[places.shards[index]][row]
    return found
