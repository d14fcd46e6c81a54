"""The local backend: every role in the driver's process, one rank a role.

A call runs at once in the caller's thread, so `breakpoint()` works in a worker and a traceback is one piece; what `submit` returns
is therefore done already.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.controller.dispatch import Call, MeshInfo
from hybridflow.controller.future import Part
from hybridflow.controller.read_only import TensorVersions, isolate
from hybridflow.controller.worker import RankInfo, Worker, WorkerFactory


class LocalBackend:
    """Implements `Backend` in this process. A role is built by its factory when it is first needed."""

    def __init__(self, roles: Mapping[str, WorkerFactory]) -> None:
        self._factories = dict(roles)
        self._workers: dict[str, Worker] = {}
        self._building: list[str] = []

    def mesh(self, role: str) -> MeshInfo:
        """One rank."""
        return MeshInfo(world_size=1)

    def worker(self, role: str) -> Worker:
        """The worker of a role, built if need be: a factory asks here for the one whose module it shares."""
        if role not in self._workers:
            assert role in self._factories, f"there is no role {role!r}: the roles are {sorted(self._factories)}"
            assert role not in self._building, f"roles need each other to be built: {' → '.join([*self._building, role])}"
            info = RankInfo(role=role)
            self._building.append(role)
            try:
                worker = self._factories[role](info)
            except Exception as error:
                error.add_note(f"while building role {role!r}, rank 0")
                raise
            finally:
                self._building.pop()
            worker.rank_info = info
            self._workers[role] = worker
        return self._workers[role]

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Run the call here and now."""
        assert len(calls) == 1, f"{role}.{method} was dispatched to {len(calls)} ranks; the local backend has one"
        return [self._invoke(role, method, call) for call in calls if call is not None]

    def submit(self, role: str, method: str, calls: Sequence[Call | None]) -> dict[int, Part]:
        """Run the call here and now; its result or its exception waits in the future."""
        part: Part = concurrent.futures.Future()
        try:
            results = self.run(role, method, calls)
        except Exception as error:  # kept for whoever asks for the result, as a worker in another process would
            part.set_exception(error)
        else:
            part.set_result(results[0])
        return {0: part}

    def shutdown(self) -> None:
        """Forget all workers; they are built anew when needed again."""
        self._workers.clear()

    def _invoke(self, role: str, method: str, call: Call) -> Any:
        worker = self.worker(role)
        arguments: dict[str, Any] = {f"argument {index}": value for index, value in enumerate(call.args)}
        versions = TensorVersions(arguments | call.kwargs)
        try:
            result = getattr(worker, method)(*isolate(call.args), **isolate(call.kwargs))
        except Exception as error:
            error.add_note(f"in {role}.{method}, rank 0")
            raise
        written = ", ".join(versions.changed())
        assert not written, f"{role}.{method} wrote in place into {written} of its arguments, which are the driver's: write to a clone"
        return isolate(result)
