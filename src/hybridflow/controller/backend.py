"""The interface of a backend, which hosts workers of named roles on ranks and calls their methods by name,
and that by which a worker calls the workers of another role, without the driver in between.

Every backend treats arguments and results as read-only: what a worker does to a batch never reaches the
driver, and what the driver does to a result never reaches the worker. The conformance suite in
`tests/unit/controller` checks this for every backend.

A `Future` is the result of a call that may still run, made from the results of its ranks. Every wait names
the call and may have a deadline. A future may be an argument of another call, `group.call(method,
future.by_reference())`: where both calls deal alike, its parts then go from rank to rank without passing
through the driver. `worker_group.resolve_futures` has the rules.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from hybridflow.controller.dispatch import Call, Dispatch, Lane, ShardedCall
from hybridflow.controller.mesh import MeshInfo
from hybridflow.errors import WorkerError
from hybridflow.protocol import DataProto

Part = concurrent.futures.Future[Any]
"""The future for one rank's result. A backend may return a subclass, which it can pass on to another rank
without fetching the value.
"""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class CallSource:
    """The call that a future belongs to: its dispatch rule, its mesh, and how it was sharded."""

    dispatch: Dispatch
    mesh: MeshInfo
    sharded: ShardedCall


class Future(Generic[R]):
    """The result of a call on some ranks. Wait for it with `result()`, or `await` it.

    `parts` has an entry for every rank that was called. `collect` gets the results of the ranks in `taken`
    (by default all), in the order of ranks.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        collect: Callable[[list[Any]], R],
        *,
        role: str,
        method: str,
        taken: tuple[int, ...] | None = None,
        source: CallSource | None = None,
    ) -> None:
        self.parts = dict(sorted(parts.items()))
        self.role = role
        self.method = method
        if taken is None:
            taken = tuple(self.parts)
        self.taken = taken
        self.source = source
        self._collect = collect

    def done(self) -> bool:
        """Return True when no rank is still running."""
        return all(part.done() for part in self.parts.values())

    def result(self, timeout: float | None = None) -> R:
        """Return the collected result, or raise the exception of the first rank that failed.

        After `timeout` seconds WorkerError is raised, which names the role, the method and the ranks that
        have not answered.
        """
        self.wait(timeout)
        return self._collect([self.parts[rank].result() for rank in self.taken])

    def wait(self, timeout: float | None = None) -> None:
        """Wait like `result`, and leave the results where they are."""
        concurrent.futures.wait(self.parts.values(), timeout, concurrent.futures.FIRST_EXCEPTION)
        for part in self.parts.values():
            if part.done() and (error := part.exception()) is not None:
                raise error
        late = [rank for rank, part in self.parts.items() if not part.done()]
        if late:
            message = f"{self.role}.{self.method} has not finished after {timeout} s on ranks {late}"
            raise WorkerError(message, role=self.role, rank=late[0], method=self.method)

    def get(self) -> R:
        """Return `result()` without a deadline; `DataProtoFuture` calls this method of its parts."""
        return self.result()

    def by_reference(self) -> R:
        """Return this future typed as its value, so that it can be an argument in the value's place."""
        return cast(R, self)

    def __await__(self) -> Generator[Any, None, R]:
        parts = [asyncio.wrap_future(part) for part in self.parts.values()]
        results = dict(zip(self.parts, (yield from asyncio.gather(*parts).__await__()), strict=True))
        return self._collect([results[rank] for rank in self.taken])


def replace(value: Any, kind: type[Any], give: Callable[[Any], Any]) -> Any:
    """Replace everything of a kind in a value by `give(found)`, at any depth of lists, tuples, dictionaries
    and among the shards of a DataProto. Containers without any are returned as they are, not copied.
    """
    if isinstance(value, kind):
        return give(value)
    if isinstance(value, DataProto) and value.remote:
        shards = {id(shard): shard for column in value.remote.values() for shard in column.shards}
        given = {key: replace(shard, kind, give) for key, shard in shards.items()}
        if all(given[key] is shard for key, shard in shards.items()):
            return value
        remote = {name: column.moved(given) for name, column in value.remote.items()}
        return DataProto(value.batch, value.non_tensor_batch, value.meta_info, remote)
    if type(value) is dict:
        entries = {key: replace(entry, kind, give) for key, entry in value.items()}
        if all(entries[key] is entry for key, entry in value.items()):
            return value
        return entries
    if type(value) in (list, tuple):
        items = [replace(entry, kind, give) for entry in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(items)
    return value


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

        Calls of one caller reach a lane in their order. A worker's calls have no separate deadline: that
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

    def are_colocated(self, role: str, other: str) -> bool:
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
