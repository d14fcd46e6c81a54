"""The base class of all workers, whose methods the driver calls, and their coordinates among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hybridflow.config.root import ProfilerTool
from hybridflow.controller.dispatch import Dispatch, register
from hybridflow.distributed.device import peak_since_asked
from hybridflow.observability.profiling import ProfiledSpan, ProfileSettings, check_tool, profiler
from hybridflow.protocol import DataProto


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

    def close(self) -> None:
        """Give back what a worker has outside of its process; it is dropped after that."""

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def stored(self, rows: DataProto) -> DataProto:
        """Return rows whose columns have come by reference, by value."""
        return rows

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def peak_memory(self) -> int:
        """Return the most bytes that this process has had since it was asked last; 0: not known."""
        return peak_since_asked()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def check_profile(self, tool: ProfilerTool) -> None:
        """Raise ConfigError where this process cannot record with a tool."""
        check_tool(tool)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def profile(self, settings: ProfileSettings | None) -> None:
        """Record from now on what this process does, and with settings what their tool records."""
        profiler.start(settings)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def profiled(self) -> list[ProfiledSpan]:
        """End the recording; return the spans, or none where another role of the process has returned
        them."""
        return profiler.stop()


WorkerFactory: TypeAlias = Callable[[RankInfo], Worker]
"""A function that builds the worker of one rank, in the process that will host it."""
Factories: TypeAlias = Mapping[str, WorkerFactory]
"""The worker factory of each role."""
