"""What lives on a rank: a worker, told by its backend which role, which rank and of how many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class RankInfo:
    """A worker's place."""

    role: str
    rank: int = 0
    world_size: int = 1


class Worker:
    """Base of all workers. A subclass needs not call `__init__`: the backend sets `rank_info` right after building it."""

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
