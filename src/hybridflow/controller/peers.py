"""The interface by which a worker calls the workers of another role, without the driver in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hybridflow.controller.future import Future

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
