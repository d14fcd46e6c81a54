"""The interface of a backend, which hosts workers of named roles on ranks and calls their methods by name,
and that by which a worker calls the workers of another role, without the driver in between.

Every backend treats arguments and results as read-only: what a worker does to a batch never reaches the
driver, and what the driver does to a result never reaches the worker. The conformance suite in
`tests/unit/controller` checks this for every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hybridflow.controller.dispatch import Call, Lane
from hybridflow.controller.future import Future, Part
from hybridflow.controller.mesh import MeshInfo
from hybridflow.protocol import DataProto

P = ParamSpec("P")
R = TypeVar("R")


class Peers(Protocol):
    """The ranks of a role. `WorkerGroup` is one for the driver; `Backend.peers` gives one for a worker."""

    @property
    def role(self) -> str:
        """The name of the role in the run."""
        ...

    def call_one(
        self, rank: int, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Call a registered method on one rank, in its own lane.

        Calls of one caller reach a lane in their order. A worker's calls have no deadline of their own: that
        a process is lost is noticed by the driver, which ends the run.
        """
        ...


class Backend(Protocol):
    """A host of workers. The implementations are `local.LocalBackend` and `ray.backend.RayBackend`.

    Arguments may contain `Part`s of earlier calls, at any depth of lists, tuples and dictionaries; the worker
    gets the part's result in its place (`future.replace`). Ranks that share arguments share the objects
    `args` and `kwargs` (`Call.arguments_id`), so that a backend which must copy them does so once.
    """

    @property
    def in_process(self) -> bool:
        """Whether the workers are in the driver's process, so that arguments need not be sent."""
        ...

    @property
    def call_timeout(self) -> float:
        """Seconds that a call may take."""
        ...

    def store(self, columns: DataProto) -> Part:
        """Put columns of the driver where any worker can read them; return them as a shard."""
        ...

    def driver_bytes(self) -> int:
        """Return the bytes that the driver has sent and received by value since it was asked last."""
        ...

    def mesh(self, role: str) -> MeshInfo:
        """Return how the ranks of a role are arranged."""
        ...

    def together(self, role: str, other: str) -> bool:
        """Return whether two roles share a process, so that their calls cannot overlap."""
        ...

    def peers(self, role: str) -> Peers:
        """Return the ranks of a role as a worker calls them itself, to be passed to it as an argument."""
        ...

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Call `method` on each rank that has a `Call`, and wait for all of them.

        Returns the results of the calls with `returns`, in the order of ranks. Raises the exception of the
        first rank that failed, with a note that names role, method and rank.
        """
        ...

    def submit(
        self, role: str, method: str, calls: Sequence[Call | None], lane: Lane = "ordered"
    ) -> dict[int, Part]:
        """Call `method` like `run`, without waiting, in the threads of a `lane`.

        Returns a part for each rank that is called; its value is None where the call does not return one.
        """
        ...

    def shutdown(self) -> None:
        """End all workers."""
        ...
