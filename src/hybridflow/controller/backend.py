"""What a backend promises: workers of named roles, on ranks, to be called by method name.

Both backends treat arguments and results as read-only: what a worker does to a batch it was handed never reaches the driver,
and what the driver does to a result never reaches the worker. The conformance suite in `tests/unit/controller` holds every
backend to this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hybridflow.controller.dispatch import Call, MeshInfo
from hybridflow.controller.future import Part


class Backend(Protocol):
    """Hosts the workers. Implementations: `local.LocalBackend`."""

    def mesh(self, role: str) -> MeshInfo:
        """The ranks of a role."""
        ...

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Call `method` on each rank that has a `Call` and wait; results in the order of ranks.

        The first failing rank's exception comes through, with a note that says role, rank and method.
        """
        ...

    def submit(self, role: str, method: str, calls: Sequence[Call | None]) -> dict[int, Part]:
        """Like `run` without waiting: by rank, the result to come or its exception."""
        ...

    def shutdown(self) -> None:
        """Let go of all workers."""
        ...
