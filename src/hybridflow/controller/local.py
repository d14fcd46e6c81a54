"""The workers of one process, and the backend that has no other process.

backend ──invoke(role, method, call)──► WorkerHost ──► the role's Worker ──► its result

Workers are built when they are first needed, and called by name. `LocalBackend` has one rank of every role,
in the driver's process: a call runs at once in the caller's thread, so `breakpoint()` works in a worker and a
traceback is one piece. The parts that `submit` returns are therefore already done. An engine that generates
is stepped in its own thread, as everywhere.

`isolate` keeps driver and workers of one process apart as two processes are: each has its own containers
around the same tensors. `TensorVersions` detects tensors that were written in place.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hybridflow.controller.backend import Part, Peers, replace
from hybridflow.controller.dispatch import Call, Lane, registration_of
from hybridflow.controller.mesh import MeshInfo
from hybridflow.controller.worker import Factories, Place, RankInfo, Worker
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.observability.profiling import profiler
from hybridflow.protocol import DataProto


def isolate(value: Any) -> Any:
    """Return the same value in new containers (DataProto, dict, list, tuple, object columns) that share the
    tensors.
    """
    if isinstance(value, DataProto):
        columns = {name: isolate(column) for name, column in value.non_tensor_batch.items()}
        return DataProto(value.batch.clone(recurse=False), columns, value.meta_info, value.remote)
    if type(value) is dict:
        return {key: isolate(entry) for key, entry in value.items()}
    if type(value) is list:
        return [isolate(entry) for entry in value]
    if type(value) is tuple:
        return tuple(isolate(entry) for entry in value)
    if isinstance(value, np.ndarray):
        copy = value.copy()
        if copy.dtype == object:
            copy[...] = np.frompyfunc(isolate, 1, 1)(value)
        return copy
    return value


class TensorVersions:
    """The version counters of all tensors inside a value, to find out later which were written."""

    def __init__(self, value: Any) -> None:
        self._seen = [
            (name, tensor, tensor._version)
            for name, tensor in _tensors(value, "")
            if not tensor.is_inference()
        ]

    def changed(self) -> list[str]:
        """Return the names of the tensors that were written since."""
        return [name for name, tensor, version in self._seen if tensor._version != version]


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, DataProto):
        for key, tensor in value.batch.items():
            if isinstance(tensor, Tensor):
                yield str(key), tensor
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _tensors(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _tensors(entry, f"{name}[{index}]")


class WorkerHost:
    """The workers of a process, built by the factories that `make` returns.

    `infos` has the rank of each role that is placed here; by default these are all roles with a factory, with
    the rank of the place.
    """

    def __init__(
        self,
        place: Place,
        make: Callable[[WorkerHost], Factories],
        infos: Mapping[str, RankInfo] | None = None,
    ) -> None:
        self.place = place
        self._factories = dict(make(self))
        if infos is None:
            infos = {role: RankInfo(role, place.rank, place.world_size) for role in self._factories}
        self._infos = dict(infos)
        self._workers: dict[str, Worker] = {}
        self._building: list[str] = []
        self._lock = threading.RLock()  # requests may come while ordered calls begin

    def has(self, role: str) -> bool:
        """Return whether a role is placed in this process."""
        return role in self._infos

    def worker(self, role: str) -> Worker:
        """Return the worker of a role, and build it if it does not exist.

        A factory calls this for the worker whose module its own worker shares.
        """
        with self._lock:
            if role not in self._workers:
                self._workers[role] = self._build(role)
            return self._workers[role]

    def _build(self, role: str) -> Worker:
        assert role in self._infos, (
            f"there is no role {role!r} in this process: the roles are {sorted(self._infos)}"
        )
        assert role in self._factories, (
            f"nothing builds role {role!r}: there are factories for {sorted(self._factories)}"
        )
        assert role not in self._building, (
            f"roles need each other to be built: {' → '.join([*self._building, role])}"
        )
        info = self._infos[role]
        self._building.append(role)
        try:
            worker = self._factories[role](info)
        except Exception as error:
            error.add_note(f"while building role {role!r}, {self._where(role)}")
            raise
        finally:
            self._building.pop()
        worker.rank_info = info
        return worker

    def invoke(self, role: str, method: str, call: Call) -> Any:
        """Call a method of a role's worker; return its result, or None where the call does not return one.

        An exception gets a note that names role, method and rank. Raises AssertionError where the method
        wrote into a tensor among its arguments, which belong to the driver and may be read by other ranks, or
        returned a column that it is not registered to write.
        """
        bound = getattr(self.worker(role), method)
        args, kwargs = replace((call.args, call.kwargs), DataProto, DataProto.materialized)
        arguments: dict[str, Any] = {f"argument {index}": value for index, value in enumerate(args)}
        versions = TensorVersions(arguments | kwargs)
        try:
            with profiler.span(f"{role}.{method}"):
                result = bound(*isolate(args), **isolate(kwargs))
            registration_of(bound).check_written(result)
        except Exception as error:
            error.add_note(f"in {role}.{method}, {self._where(role)}")
            raise
        written = ", ".join(versions.changed())
        assert not written, (
            f"{role}.{method} wrote in place into {written} of its arguments, which belong to the driver: "
            "write to a clone"
        )
        if not call.returns:
            return None
        return isolate(result)

    def clear(self) -> None:
        """Close and drop all workers; they are built again when they are needed."""
        with ExitStack() as closing:  # each is closed, also where another cannot be
            for worker in self._workers.values():
                closing.callback(worker.close)
            self._workers.clear()

    def _where(self, role: str) -> str:
        rank = f"rank {self._infos[role].rank}"
        if self.place.node:
            return f"{rank} on node {self.place.node}"
        return rank


Make: TypeAlias = Callable[[WorkerHost], Factories]
"""A function from the host of a process to the factories of its workers; each backend is given one."""


def in_memory(columns: DataProto) -> Part:
    """Return a shard in this process, which shares the tensors of `columns`."""
    part: Part = concurrent.futures.Future()
    part.set_result(isolate(columns))
    return part


class LocalBackend:
    """A backend in this process. The worker of a role is built when it is first needed."""

    in_process = True
    call_timeout = math.inf

    def __init__(self, make: Make) -> None:
        self.host = WorkerHost(Place(), make)

    def driver_bytes(self) -> int:
        """Return 0: arguments and results are the same tensors on both sides."""
        return 0

    def store(self, columns: DataProto) -> Part:
        """Return a shard that shares the tensors of `columns`."""
        return in_memory(columns)

    def mesh(self, role: str) -> MeshInfo:
        """Return a mesh of one rank."""
        return MeshInfo(world_size=1)

    def are_colocated(self, role: str, other: str) -> bool:
        """Return True, since all roles are in this process."""
        return True

    def peers(self, role: str) -> Peers:
        """See `Backend.peers`."""
        return WorkerGroup[Worker](self, role)

    def worker(self, role: str) -> Worker:
        """Return the worker of a role, and build it if it does not exist."""
        return self.host.worker(role)

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Run the call at once."""
        assert len(calls) == 1, (
            f"{role}.{method} was dispatched to {len(calls)} ranks; the local backend has one"
        )
        results = []
        for call in calls:
            if call is not None:
                args, kwargs = replace((call.args, call.kwargs), concurrent.futures.Future, Part.result)
                result = self.host.invoke(role, method, Call(args, kwargs, call.returns))
                if call.returns:
                    results.append(result)
        return results

    def submit(
        self, role: str, method: str, calls: Sequence[Call | None], lane: Lane = "ordered"
    ) -> dict[int, Part]:
        """Run the call at once in the caller's thread, whatever its lane, and return a part that holds its
        result or its exception.
        """
        part: Part = concurrent.futures.Future()
        try:
            results = self.run(role, method, calls)
        except Exception as error:  # raised where the result is asked for, as with a worker process
            part.set_exception(error)
        else:
            part.set_result(next(iter(results), None))
        return {0: part}

    def shutdown(self) -> None:
        """Drop all workers; they are built again when they are needed."""
        self.host.clear()
