"""The arrangement of a role's ranks, and the parts into which it divides a batch.

    axes (("dp", 2), ("sp", 2)):   rank 0 1 2 3
                                   part 0 0 1 1

The ranks of a part hold the same rows. One of them is its leader: the first along `sp` and `tp`, and the last
along `pp`, whose stage computes the outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from hybridflow.protocol.balancing import Workload

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
        """The number of parts into which rows are dealt."""
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
