"""What a backend promises: workers of named roles, on ranks, to be called by method name.

All backends treat arguments and results as read-only: what a worker does to a batch it was handed never
reaches the driver, and what the driver does to a result never reaches the worker. The conformance suite in
`tests/unit/controller` holds every backend to this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hybridflow.controller.dispatch import Call
from hybridflow.controller.future import Part
from hybridflow.controller.mesh import MeshInfo


class Backend(Protocol):
    """Hosts the workers. Implementations: `local.LocalBackend`, `ray.backend.RayBackend`.

    Arguments may hold `Part`s of earlier calls, at any depth of lists, tuples and dictionaries: what the
    worker gets in such a place is the part's result (`future.replace_parts`). Ranks that share arguments
    share `args` and `kwargs` themselves (`Call.arguments_id`), so a backend that must copy them does so once.
    """

    def mesh(self, role: str) -> MeshInfo:
        """The ranks of a role."""
        ...

    def together(self, role: str, other: str) -> bool:
        """Whether two roles live in the same processes, so that their calls cannot overlap."""
        ...

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Call `method` on each rank that has a `Call` and wait for all; the results of those with `returns`,
        in the order of ranks.

        The first failing rank's exception comes through, with a note that says role, method and rank.
        """
        ...

    def submit(self, role: str, method: str, calls: Sequence[Call | None]) -> dict[int, Part]:
        """Like `run` without waiting: by rank called, the result to come (None where it does not return) or
        its exception.
        """
        ...

    def shutdown(self) -> None:
        """Let go of all workers."""
        ...
