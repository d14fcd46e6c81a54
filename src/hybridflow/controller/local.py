"""The local backend: every role has one rank, in the driver's process.

A call runs at once in the caller's thread, so `breakpoint()` works in a worker and a traceback is one piece.
The parts that `submit` returns are therefore already done. An engine that generates is stepped in a thread of
its own, as everywhere.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Sequence
from typing import Any

from hybridflow.controller.dispatch import Call, Lane
from hybridflow.controller.future import Part, replace
from hybridflow.controller.mesh import MeshInfo
from hybridflow.controller.peers import Peers
from hybridflow.controller.place import Place
from hybridflow.controller.read_only import isolate
from hybridflow.controller.worker import Worker
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.controller.worker_host import Make, WorkerHost
from hybridflow.protocol import DataProto


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

    def together(self, role: str, other: str) -> bool:
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
