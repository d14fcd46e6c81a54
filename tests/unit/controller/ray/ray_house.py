"""Workers and backends of the tests on Ray, in a module that the processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from house import Counter

from hybridflow.controller import (
    Dispatch,
    Factories,
    MeshInfo,
    Placement,
    RankInfo,
    ResourcePool,
    Worker,
    WorkerGroup,
    WorkerHost,
    register,
)
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.protocol import DataProto


class Prober(Counter):
    """Looks around where it lives, and fails in all ways."""

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def look(self) -> tuple[int, int, int, int]:
        """Process, rank of the role, rank and size of the torch.distributed world (0 without one)."""
        world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 0)
        return os.getpid(), self.rank, *world

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def folder(self) -> str:
        """Where relative paths begin."""
        return os.getcwd()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        """Over the torch.distributed world."""
        tensor = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(tensor)
        return float(tensor)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("doubled",))
    def write_or_die(self, batch: DataProto, *, rank: int) -> DataProto:
        """One rank is killed before it returns."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return DataProto.from_dict({"doubled": batch.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self, folder: str, count: int) -> bool:
        """Wait until as many roles are in this call at once; False where they do not come for two minutes."""
        Path(folder, self.role).touch()
        until = time.monotonic() + 120
        while len(os.listdir(folder)) < count and time.monotonic() < until:
            time.sleep(0.02)
        return len(os.listdir(folder)) == count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def span(self, seconds: float) -> tuple[float, float]:
        """When it began and when it ended."""
        began = time.time()
        time.sleep(seconds)
        return began, time.time()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_alone(self, rank: int) -> None:
        """One rank raises, the others wait for it in a collective."""
        if self.rank == rank:
            raise Picky("it was me", code=7)
        self.sum_of_ranks()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bad_result(self) -> object:
        return (number for number in range(3))  # a generator cannot travel


class Picky(Exception):
    """Cannot be pickled: its constructor wants more than its text."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


def make_workers(host: WorkerHost) -> Factories:
    def prober(info: RankInfo) -> Worker:
        return Prober(10)

    return dict.fromkeys(("counter", "other", "critic", "rollout"), prober)


def make_broken(host: WorkerHost) -> Factories:
    def broken(info: RankInfo) -> Worker:
        raise ValueError(f"no model for rank {info.rank}")

    return {"counter": broken}


def start(
    cluster: RayCluster,
    sizes: Mapping[str, int],
    pools: Mapping[str, str],
    make=make_workers,
    rooms: Sequence[str] = (),
    **settings: float,
) -> RayBackend:
    """A backend with pools of these sizes on one node each; `pools` names the pool of each role, or
    several. The processes can also import the test modules of other `rooms`.
    """
    names = {role: tuple(names.split()) for role, names in pools.items()}
    placement = Placement(tuple(ResourcePool(name, (size,)) for name, size in sizes.items()), names)
    meshes = {role: MeshInfo(sum(sizes[name] for name in where)) for role, where in names.items()}
    times = {"call_timeout": 600.0, "heartbeat_timeout": 300.0, "startup_timeout": 900.0} | settings
    # of this file and house.py
    folders = [*Path(__file__).parents[:2], *(Path(__file__).parents[2] / room for room in rooms)]
    path = {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}
    return RayBackend(
        cluster, placement, meshes, make, device="cpu", num_threads=1, runtime_env={"env_vars": path}, **times
    )


def ask(backend: RayBackend, role: str = "counter") -> WorkerGroup[Prober]:
    return WorkerGroup(backend, role)
