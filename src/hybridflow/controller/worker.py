"""What lives on a rank: a worker, told by its backend which role, which rank and of how many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Place:
    """A process of a resource pool. All roles that are placed on the pool live in it."""

    pool: str = "global"
    rank: int = 0
    """Among the processes of the pool, which are one torch.distributed world."""
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of the pool on its node: the number of its device there."""
    node: str = ""
    """Name or address of the machine; empty: the driver's."""


@dataclass(frozen=True)
class RankInfo:
    """A worker's number among all of its role; a role may span pools, so this may differ from its place's."""

    role: str
    rank: int = 0
    world_size: int = 1


class Worker:
    """Base of all workers. A subclass needs not call `__init__`: the backend sets `rank_info` right after
    building it.
    """

    rank_info: RankInfo = RankInfo(role="unplaced")

    @property
    def role(self) -> str:
        """Name of the role in the run, for example `actor`."""
        return self.rank_info.role

    @property
    def rank(self) -> int:
        """This worker's number among those of its role."""
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        """How many workers the role has."""
        return self.rank_info.world_size


WorkerFactory: TypeAlias = Callable[[RankInfo], Worker]
"""Builds the worker of one rank, in the process where it will live."""
Factories: TypeAlias = Mapping[str, WorkerFactory]
"""By role."""
