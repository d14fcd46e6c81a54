"""The place of a worker: its process in a pool, and its rank among the workers of its role."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A worker's rank among all workers of its role; not that of its place where the role spans pools."""

    role: str
    rank: int = 0
    world_size: int = 1
