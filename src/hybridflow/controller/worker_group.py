"""The driver's view of one role: typed calls in, dispatched to the ranks of a backend, one typed result out.

A typed group stands beside its worker class:

    class ActorGroup(WorkerGroup[ActorWorker]):
        def log_probs(self, batch: DataProto) -> DataProto:
            return self.call(ActorWorker.log_probs, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hybridflow.controller.backend import Backend
from hybridflow.controller.dispatch import Call, registration_of
from hybridflow.controller.future import Future

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(Generic[W]):
    """All workers of one role."""

    def __init__(self, backend: Backend, role: str) -> None:
        self.backend, self.role = backend, role

    @property
    def world_size(self) -> int:
        """How many ranks the role has."""
        return self.backend.mesh(self.role).world_size

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a registered method by its dispatch rule and wait for the result."""
        registration = registration_of(method)
        dispatch, mesh = registration.dispatch, self.backend.mesh(self.role)
        assert registration.blocking, f"{method.__name__} is registered with blocking=False: use submit"
        assert not dispatch.per_rank, f"{method.__name__} is dispatched {dispatch.name}: use call_each"
        results = self.backend.run(self.role, method.__name__, dispatch.split(Call(args, dict(kwargs)), mesh))
        result: R = dispatch.collect(results, mesh)
        return result

    def submit(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a registered method by its dispatch rule without waiting."""
        dispatch, mesh = registration_of(method).dispatch, self.backend.mesh(self.role)
        assert not dispatch.per_rank, f"{method.__name__} is dispatched {dispatch.name}: use call_each"
        parts = self.backend.submit(self.role, method.__name__, dispatch.split(Call(args, dict(kwargs)), mesh))
        return Future(parts, lambda results: dispatch.collect(results, mesh), role=self.role, method=method.__name__)

    def call_one(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a registered method on one rank, whatever its dispatch rule; await the future or take its `result()`."""
        registration_of(method)
        world_size = self.world_size
        assert 0 <= rank < world_size, f"{self.role} has no rank {rank}: there are {world_size}"
        calls = [Call(args, dict(kwargs)) if index == rank else None for index in range(world_size)]
        parts = self.backend.submit(self.role, method.__name__, calls)
        return Future(parts, lambda results: results[0], role=self.role, method=method.__name__)

    def call_each(self, method: Callable[Concatenate[W, ...], R], *args: Sequence[Any], **kwargs: Sequence[Any]) -> list[R]:
        """Call an ALL_TO_ALL method: each argument is a list with one entry a rank, and so is the result."""
        dispatch, mesh = registration_of(method).dispatch, self.backend.mesh(self.role)
        assert dispatch.per_rank, f"{method.__name__} is dispatched {dispatch.name}: use call or submit"
        results = self.backend.run(self.role, method.__name__, dispatch.split(Call(args, dict(kwargs)), mesh))
        collected: list[R] = dispatch.collect(results, mesh)
        return collected
