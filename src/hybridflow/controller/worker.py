"""The worker of a rank, and its place: role, rank, world size, pool and node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Place:
    """A process of a resource pool, which hosts all roles that are placed on the pool."""

    pool: str = "global"
    rank: int = 0
    """The rank among the processes of the pool, which are one torch.distributed world."""
    world_size: int = 1
    local_rank: int = 0
    """The rank among the processes of the pool on its node, which is the number of its device there."""
    node: str = ""
    """The name or address of the machine; empty for the driver's."""


@dataclass(frozen=True)
class RankInfo:
    """A worker's rank among all workers of its role; it differs from its place's where the role
    spans pools.
    """

    role: str
    rank: int = 0
    world_size: int = 1


class Worker:
    """The base of all workers. The backend sets `rank_info` right after it has built one, so a subclass need
    not call `__init__`.
    """

    rank_info: RankInfo = RankInfo(role="unplaced")

    @property
    def role(self) -> str:
        """The name of the role in the run, for example `actor`."""
        return self.rank_info.role

    @property
    def rank(self) -> int:
        """This worker's rank among the workers of its role."""
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        """The number of workers of the role."""
        return self.rank_info.world_size


WorkerFactory: TypeAlias = Callable[[RankInfo], Worker]
"""A function that builds the worker of one rank, in the process that will host it."""
Factories: TypeAlias = Mapping[str, WorkerFactory]
"""The worker factory of each role."""
