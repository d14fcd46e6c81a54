"""The arrangement of a role's ranks, the parts into which it divides a batch, and the distribution of rows
or items over these parts, with the way back of rows.

    axes (("dp", 2), ("sp", 2)):   rank 0 1 2 3
                                   part 0 0 1 1

The ranks of a part hold the same rows. One of them is its leader: the first along `sp` and `tp`, and the last
along `pp`, whose stage computes the outputs.

rows ──plan──► order [[0, 3, 4], [1, 2]] ──cut──► parts ──ranks──► results ──undo──► the driver's order
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, product
from typing import Any

from hybridflow.protocol import DataProto
from hybridflow.protocol.balancing import Workload, deal_in_order, deal_rows

SHARED_ROWS = ("pp", "sp", "tp")
"""Axes along which all ranks work on the same rows."""


@dataclass(frozen=True)
class MeshInfo:
    """The number of a role's ranks and their arrangement along axes."""

    world_size: int
    axes: tuple[tuple[str, int], ...] = ()
    """Name and size of each axis, slowest first, for example (("dp", 4), ("tp", 2)); empty for data parallel
    only.
    """
    workload: Workload | None = None
    """The cost of a row, by which rows are balanced; None for contiguous chunks with equally many rows."""

    def __post_init__(self) -> None:
        size = math.prod(size for _, size in self.axes)
        assert not self.axes or size == self.world_size, (
            f"axes {self.axes} make {size} ranks, not {self.world_size}"
        )

    @cached_property
    def num_parts(self) -> int:
        """The number of parts into which rows are sharded."""
        if not self.axes:
            return self.world_size
        return math.prod(size for name, size in self.axes if name not in SHARED_ROWS)

    def part_of(self, rank: int) -> int:
        """Return the part that a rank works on."""
        return self._places[rank][0]

    def is_leader(self, rank: int) -> bool:
        """Return whether a rank is the one of those with its part that returns results."""
        return self._places[rank][1]

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The leading rank of each part."""
        return tuple(
            sorted((rank for rank in range(self.world_size) if self.is_leader(rank)), key=self.part_of)
        )

    @cached_property
    def _places(self) -> list[tuple[int, bool]]:
        """The part of each rank, and whether it is its leader."""
        if not self.axes:
            return [(rank, True) for rank in range(self.world_size)]
        places = []
        for coordinates in product(*(range(size) for _, size in self.axes)):
            part = 0
            leads = True
            for (name, size), coordinate in zip(self.axes, coordinates, strict=True):
                if name == "pp":
                    leads = leads and coordinate == size - 1
                elif name in SHARED_ROWS:
                    leads = leads and coordinate == 0
                else:
                    part = part * size + coordinate
            places.append((part, leads))
        return places


@dataclass(frozen=True)
class PerRank:
    """An argument with a value for each rank: the results of the same ranks of an earlier call, which stay
    where they are.
    """

    values: list[Any]


def plan_rows(batches: Sequence[DataProto], mesh: MeshInfo) -> list[list[int]]:
    """Choose the rows of each part, the same for all of these batches, by the first that has a column.

    Raises AssertionError for batches of different lengths.
    """
    sizes = sorted({len(batch) for batch in batches})
    assert len(sizes) == 1, (
        f"the DataProto arguments of one call are dealt together, but they have {sizes} rows"
    )
    groups = next((batch.batch["group_ids"].tolist() for batch in batches if "group_ids" in batch), None)
    masks = next((batch.batch["attention_mask"] for batch in batches if "attention_mask" in batch), None)
    if masks is None or mesh.workload is None:
        return deal_in_order(sizes[0], mesh.num_parts, groups)
    return deal_rows(masks.sum(-1).tolist(), mesh.num_parts, mesh.workload, groups)


def plan_items(items: Sequence[Any], mesh: MeshInfo) -> list[list[int]]:
    """Choose the items of each part, by their `deal_cost`; items of equal `deal_key` stay together."""
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(item.deal_key, len(numbers)) for item in items]
    if mesh.workload is None:
        return deal_in_order(len(items), mesh.num_parts, groups)
    return deal_rows([item.deal_cost for item in items], mesh.num_parts, Workload(), groups)


def cut_rows(batch: DataProto, order: Sequence[Sequence[int]]) -> list[DataProto]:
    """Return the rows of each part, as views of one gathered copy, or of the batch where its order stays."""
    rows = list(chain.from_iterable(order))
    assert len(rows) == len(batch), f"{len(batch)} rows cannot be dealt by a plan of {len(rows)}"
    if not _is_in_order(rows):
        batch = batch.select_idxs(rows)
    cuts = pairwise([0, *accumulate(len(part) for part in order)])
    return [batch.slice(start, end) for start, end in cuts]


def cut_items(items: Sequence[Any], order: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Return the items of each part."""
    return [[items[index] for index in part] for part in order]


def undo_rows(parts: Sequence[DataProto], order: Sequence[Sequence[int]]) -> DataProto:
    """Return the rows of all parts in the driver's order."""
    got = [len(part) for part in parts]
    sent = [len(part) for part in order]
    assert got == sent, (
        f"the parts were given {sent} rows and returned {got}: a method must return one for each"
    )
    joined = DataProto.concat(parts)
    rows = list(chain.from_iterable(order))
    if _is_in_order(rows):
        return joined
    places = [0] * len(rows)
    for place, row in enumerate(rows):
        places[row] = place
    return joined.select_idxs(places)


def _is_in_order(rows: Sequence[int]) -> bool:
    return all(row == index for index, row in enumerate(rows))
