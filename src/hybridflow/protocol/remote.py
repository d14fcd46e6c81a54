"""Columns of a batch whose rows are elsewhere: in a process that made them, or in a store of the backend.

    DataProto.remote[name] ──select_idxs, concat, |= …──► the same rows, still elsewhere
                           ──gather, once the shards are here──► a column as any other
A shard is a DataProto, or a future of one. It lives as long as a batch has one of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.protocol.fields import fit_column

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto

NOWHERE = -1
"""In place of the number of a shard: the row is in none."""
Numbers = np.ndarray[Any, np.dtype[np.int32]]


def widths_of(part: DataProto) -> tuple[int, int]:
    """Return the widths (P, R) of prompts and responses, by the masks."""
    response = part.batch["response_mask"].shape[1]
    return part.batch["attention_mask"].shape[1] - response, response


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """The places of a column's rows. The values do not change as long as they are remote."""

    shards: tuple[Any, ...]
    """Futures of the shards that the rows are in, or the shards; for no rows one that has the column."""
    names: tuple[str, ...]
    """The name of the column in each of them."""
    shard: Numbers
    """[B] the index of each row's shard, or NOWHERE."""
    row: Numbers
    """[B] the number of each row in its shard."""
    fit: tuple[int, int, int] | None = None
    """Widths (P, R) to which shards are padded or cut, and the id of padding; None: all have the same."""
    copies: tuple[tuple[Tensor, int], ...] = ()
    """Tensors with the same values that the driver has, and how often each had been written to."""

    @classmethod
    def of_shards(
        cls, shards: Sequence[Any], name: str, order: Sequence[Sequence[int]], copy: Tensor | None = None
    ) -> RemoteColumn:
        """Return the column of which each shard has the rows that `order` lists, in this order; the driver
        has a `copy` of it.
        """
        places = np.full((2, sum(map(len, order))), NOWHERE, dtype=np.int32)
        for index, rows in enumerate(order):
            here = np.asarray(rows, dtype=np.int64)
            places[0, here] = index
            places[1, here] = np.arange(len(here))
        copies: tuple[tuple[Tensor, int], ...] = ()
        if copy is not None and not copy.is_inference():
            copies = ((copy, copy._version),)
        return cls(tuple(shards), (name,) * len(shards), places[0], places[1], copies=copies)

    @classmethod
    def in_shard(
        cls, shard: Any, name: str, rows: Sequence[int], fit: tuple[int, int, int] | None = None
    ) -> RemoteColumn:
        """Return the column that has these rows of a shard."""
        numbers = np.array(rows, dtype=np.int32)
        return cls((shard,), (name,), np.zeros_like(numbers), numbers, fit)

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def is_complete(self) -> bool:
        """Whether every row is in a shard."""
        return not bool((self.shard == NOWHERE).any())

    def __getitem__(self, rows: Any) -> RemoteColumn:
        """Return the column of rows, given as an index of a numpy array; other shards are let go."""
        shard = self.shard[rows]
        used, index = np.unique(shard, return_inverse=True)
        if len(used) and used[0] == NOWHERE:
            used = used[1:]
            index = index - 1
        kept = used.tolist() or [0]
        return replace(
            self,
            shards=tuple(self.shards[number] for number in kept),
            names=tuple(self.names[number] for number in kept),
            shard=index.astype(np.int32),
            row=self.row[rows],
        )

    @classmethod
    def concat(cls, parts: Sequence[RemoteColumn | int]) -> RemoteColumn:
        """Return the rows of all parts in order; a number is a count of rows that are in no shard."""
        numbers: dict[tuple[int, str], int] = {}
        shards: list[Any] = []
        found: list[tuple[Numbers, Numbers]] = []
        columns = [part for part in parts if isinstance(part, RemoteColumn)]
        for part in parts:
            if isinstance(part, int):
                nowhere = np.full(part, NOWHERE, dtype=np.int32)
                found.append((nowhere, nowhere))
                continue
            for shard, name in zip(part.shards, part.names, strict=True):
                if (id(shard), name) not in numbers:
                    numbers[id(shard), name] = len(shards)
                    shards.append(shard)
            own = [numbers[id(shard), name] for shard, name in zip(part.shards, part.names, strict=True)]
            found.append((np.array([*own, NOWHERE], dtype=np.int32)[part.shard], part.row))
        return cls(
            tuple(shards),
            tuple(name for _, name in numbers),
            np.concatenate([shard for shard, _ in found]),
            np.concatenate([row for _, row in found]),
            next((part.fit for part in columns if part.fit is not None), None),
            tuple(copy for part in columns for copy in part.copies),
        )

    def moved(self, given: Mapping[int, Any]) -> RemoteColumn:
        """Return the column for another process: `given` has the shards as that process names them, by id.

        Raises AssertionError where a copy was written in place: this process and that one would differ.
        """
        written = [copy for copy, version in self.copies if copy._version != version]
        assert not written, (
            f"{self.names[0]} was written in place, and other processes read it elsewhere: write to a clone"
        )
        return replace(self, shards=tuple(given[id(shard)] for shard in self.shards), copies=())

    def gather(self, arrived: Mapping[int, DataProto]) -> Tensor | np.ndarray[Any, Any]:
        """Return the values, from the shards by the id of what stood for each.

        A column that is a whole shard, in its order, is returned as it is, without a copy.
        """
        assert self.is_complete, f"some rows of {self.names[0]} are in no shard"
        columns = [
            self._column(arrived[id(shard)], name)
            for shard, name in zip(self.shards, self.names, strict=True)
        ]
        first = columns[0]
        rows = torch.from_numpy(self.row).long()
        if not isinstance(first, Tensor):
            found = np.empty(len(self), dtype=object)
            for place, (shard, row) in enumerate(zip(self.shard, self.row, strict=True)):
                found[place] = columns[shard][row]
            return found
        if len(columns) == 1:
            if len(rows) == len(first) and torch.equal(rows, torch.arange(len(rows))):
                return first
            return first[rows]
        joined = first.new_empty((len(rows), *first.shape[1:]))
        of = torch.from_numpy(self.shard)
        for number, column in enumerate(columns):
            here = of == number
            joined[here] = column[rows[here]]
        return joined

    def _column(self, shard: DataProto, name: str) -> Any:
        if name in shard.non_tensor_batch:
            return shard.non_tensor_batch[name]
        column: Tensor = shard.batch[name]
        if self.fit is None:
            return column
        prompt, response, pad_id = self.fit
        return fit_column(name, column, widths_of(shard), (prompt, response), pad_id)
