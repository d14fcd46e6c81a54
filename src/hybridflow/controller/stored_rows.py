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


@dataclass(frozen=True)
class Places:
    """The place of each row of a column."""

    shards: Sequence[int]
    """The shard of each row, as an index into `StoredRows.shards`; for no rows one that has the column."""
    rows: Sequence[int]
    """The number of each row in its shard."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of which some columns are in a store."""

    values: DataProto
    """The columns that travel by value."""
    places: Mapping[str, Places]
    """The places of each column that is in the store."""
    shards: tuple[Any, ...]
    """A `Part` for each shard until it has arrived, then its DataProto."""

    def gather(self) -> DataProto:
        """Return all columns as one batch, once the shards are here.

        A column that is a whole shard, in its order, is returned as it is, without a copy.
        """
        tensors: dict[str, Tensor] = {}
        objects: dict[str, Any] = {}
        for name, places in self.places.items():
            columns = {shard: _column(self.shards[shard], name) for shard in dict.fromkeys(places.shards)}
            if any(isinstance(column, Tensor) for column in columns.values()):
                tensors[name] = _rows_of_tensors(columns, places)
            else:
                objects[name] = _rows_of_objects(columns, places)
        return self.values | DataProto.from_dict(tensors, objects)


def _column(shard: DataProto, name: str) -> Any:
    if name in shard.non_tensor_batch:
        return shard.non_tensor_batch[name]
    return shard.batch[name]


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
