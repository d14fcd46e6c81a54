"""Workers of the conformance suite, in a module that another process can import."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Sequence
from typing import Any

import torch

from hybridflow.controller import (
    Call,
    Dispatch,
    Factories,
    MeshInfo,
    Part,
    Place,
    RankInfo,
    Worker,
    WorkerGroup,
    WorkerHost,
    register,
)
from hybridflow.controller.backend import Peers, replace
from hybridflow.controller.dispatch import Lane
from hybridflow.controller.local import in_memory
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto


class Counter(Worker):
    """Holds a number; no call of the base constructor, as real workers."""

    def __init__(self, start: int) -> None:
        self.value = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def place(self) -> tuple[str, int, int]:
        return self.role, self.rank, self.world_size

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def leaders(self, word: str) -> str:
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto, *, plus: float = 0.0) -> DataProto:
        return DataProto.from_dict(
            {"doubled": batch.batch["x"] * 2 + plus}, {"uid": batch.non_tensor_batch["uid"]}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def join(self, batch: DataProto, *, other: DataProto) -> DataProto:
        """Rows of two arguments side by side: they must have been dealt alike."""
        return DataProto.from_dict({"x": batch.batch["x"], "doubled": other.batch["doubled"]})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x", "attention_mask"), writes=("doubled", "word")
    )
    def write(self, batch: DataProto, *, times: float = 2.0) -> DataProto:
        """Columns that stay here, and the words `rank.row`."""
        words = [f"{self.rank}.{row}" for row in range(len(batch))]
        return DataProto.from_dict({"doubled": batch.batch["x"] * times}, {"word": words})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("doubled", "x"))
    def read(self, batch: DataProto) -> DataProto:
        """The columns as they arrived."""
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("doubled",))
    def write_or_fail(self, batch: DataProto, *, rank: int) -> DataProto:
        if self.rank == rank:
            raise ValueError("no luck")
        return DataProto.from_dict({"doubled": batch.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS)
    def mean(self, batch: DataProto) -> Metrics:
        metrics = Metrics()
        metrics.add_mean("x", batch.batch["x"].sum(), batch.batch["x"].numel())
        return metrics

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=("x", "doubled"))
    def mean_of_both(self, batch: DataProto) -> Metrics:
        metrics = self.mean(batch)
        metrics.add_mean("doubled", batch.batch["doubled"].sum(), batch.batch["doubled"].numel())
        return metrics

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def greet(self, name: str) -> str:
        return f"{name} at {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def slow_add(self, amount: int) -> int:
        return self.add(amount)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> dict[str, torch.Tensor]:
        return {"value": torch.tensor([float(self.value + self.rank)])}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.value = int(state["value"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_nested(self, states: dict[str, list[dict[str, torch.Tensor]]]) -> None:
        self.value = int(states["parts"][0]["value"])

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def values(self) -> int:
        return self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_list(self, words: list[str]) -> str:
        return ", ".join(words)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("no luck")

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def tell(self, luck: bool) -> tuple[str, int, int]:
        if not luck:
            raise ValueError("no luck")
        return self.role, self.rank, self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask(self, others: Peers, rank: int, *, luck: bool = True) -> tuple[str, int, int]:
        """Call another role from here."""
        return others.call_one(rank, Counter.tell, luck).result(600)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rearrange(self, batch: DataProto) -> DataProto:
        batch.batch["new"] = batch.batch["x"] + 1
        del batch.batch["x"]
        if len(batch):
            batch.non_tensor_batch["uid"][0] = "changed"
        batch.meta_info["facts"]["a"] = 2
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scribble(self, batch: DataProto) -> DataProto:
        batch.batch["x"].add_(1)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tamper(self, state: dict[str, list[int]]) -> None:
        state["steps"].append(9)
        state["more"] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def history(self) -> list[int]:
        self.kept = getattr(self, "kept", [1])
        return self.kept

    def private(self) -> int:
        return self.value


class CounterGroup(WorkerGroup[Counter]):
    def double(self, batch: DataProto, plus: float = 0.0) -> DataProto:
        return self.call(Counter.double, batch, plus=plus)


def make_counters(host: WorkerHost) -> Factories:
    """The roles of the suite: two that hold a number each."""

    def counter(info: RankInfo) -> Counter:
        return Counter(10)

    return {"counter": counter, "other": counter}


def rows(n: int = 5) -> DataProto:
    """x [n] 0..n-1, uid u0.., and rows of very different lengths."""
    mask = torch.arange(16)[None, :] < torch.tensor([1 + (row * 5) % 16 for row in range(n)])[:, None]
    tensors = {"x": torch.arange(float(n)), "attention_mask": mask}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(n)]}, {"facts": {"a": 1}})


class InTurn:
    """A backend of several ranks in this process, called one after the other: the rules of many ranks,
    without processes.
    """

    call_timeout = math.inf

    def __init__(self, mesh: MeshInfo) -> None:
        self._mesh = mesh
        self.hosts = [
            WorkerHost(Place(rank=rank, world_size=mesh.world_size), make_counters)
            for rank in range(mesh.world_size)
        ]

    def driver_bytes(self) -> int:
        return 0

    def store(self, columns: DataProto) -> Part:
        return in_memory(columns)

    def mesh(self, role: str) -> MeshInfo:
        return self._mesh

    def are_colocated(self, role: str, other: str) -> bool:
        return True

    def peers(self, role: str) -> Peers:
        return WorkerGroup[Counter](self, role)

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        parts = self.submit(role, method, calls)
        return [parts[rank].result() for rank, call in enumerate(calls) if call is not None and call.returns]

    def submit(
        self, role: str, method: str, calls: Sequence[Call | None], lane: Lane = "ordered"
    ) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        for rank, call in enumerate(calls):
            if call is not None:
                parts[rank] = concurrent.futures.Future()
                try:
                    args, kwargs = replace((call.args, call.kwargs), concurrent.futures.Future, Part.result)
                    given = Call(args, kwargs, call.returns)
                    parts[rank].set_result(self.hosts[rank].invoke(role, method, given))
                except Exception as error:
                    parts[rank].set_exception(error)
        return parts

    def shutdown(self) -> None:
        for host in self.hosts:
            host.clear()
