"""The local backend: every role in the driver's process, one rank a role.

A call runs at once in the caller's thread, so `breakpoint()` works in a worker and a traceback is one piece;
what `submit` returns is therefore done already.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

from hybridflow.controller.dispatch import Call
from hybridflow.controller.future import Part, replace_parts
from hybridflow.controller.mesh import MeshInfo
from hybridflow.controller.worker import Place, Worker
from hybridflow.controller.worker_host import Make, WorkerHost


class LocalBackend:
    """Implements `Backend` in this process. A role is built by its factory when it is first needed."""

    def __init__(self, make: Make) -> None:
        self.host = WorkerHost(Place(), make)

    def mesh(self, role: str) -> MeshInfo:
        """One rank."""
        return MeshInfo(world_size=1)

    def together(self, role: str, other: str) -> bool:
        """All roles live here."""
        return True

    def worker(self, role: str) -> Worker:
        """The worker of a role, built if need be."""
        return self.host.worker(role)

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Run the call here and now."""
        assert len(calls) == 1, (
            f"{role}.{method} was dispatched to {len(calls)} ranks; the local backend has one"
        )
        results = [
            (call, self.host.invoke(role, method, _with_results(call))) for call in calls if call is not None
        ]
        return [result for call, result in results if call.returns]

    def submit(self, role: str, method: str, calls: Sequence[Call | None]) -> dict[int, Part]:
        """Run the call here and now; its result or its exception waits in the future."""
        part: Part = concurrent.futures.Future()
        try:
            results = self.run(role, method, calls)
        except (
            Exception
        ) as error:  # kept for whoever asks for the result, as a worker in another process would
            part.set_exception(error)
        else:
            part.set_result(results[0] if results else None)
        return {0: part}

    def shutdown(self) -> None:
        """Forget all workers; they are built anew when needed again."""
        self.host.clear()


def _with_results(call: Call) -> Call:
    """The call with the results of earlier ones in the places of their parts."""
    args, kwargs = replace_parts(call.args, Part.result), replace_parts(call.kwargs, Part.result)
    return call if args is call.args and kwargs is call.kwargs else Call(args, kwargs, call.returns)
