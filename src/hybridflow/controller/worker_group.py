"""The driver's view of one role: typed calls are dispatched to the ranks, and give one typed result.

A typed group is defined beside its worker class:

    class ActorGroup(WorkerGroup[ActorWorker]):
        def log_probs(self, batch: DataProto) -> DataProto:
            return self.call(ActorWorker.log_probs, batch)

A method that declares the columns that it reads is sent these and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hybridflow.controller.backend import Backend, CallSource, Future
from hybridflow.controller.backend import replace as replace_in
from hybridflow.controller.dispatch import Call, Dispatch, ShardedCall, registration_of
from hybridflow.controller.mesh import MeshInfo, PerRank, undo_rows
from hybridflow.controller.worker import Worker
from hybridflow.protocol import DataProto
from hybridflow.protocol.remote import RemoteColumn

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(Generic[W]):
    """All workers of one role. Any argument may be the `Future` of an earlier call
    (`Future.by_reference`).

    `also_read` names, by method, columns that it reads in this run beside those that it declares; a batch
    that has no such column is sent without it.
    """

    def __init__(
        self,
        backend: Backend,
        role: str,
        *,
        also_read: Mapping[Callable[..., Any], Sequence[str]] | None = None,
    ) -> None:
        self.backend = backend
        self.role = role
        self._also_read = {method.__name__: columns for method, columns in (also_read or {}).items()}

    @property
    def mesh(self) -> MeshInfo:
        """The arrangement of the role's ranks."""
        return self.backend.mesh(self.role)

    @property
    def world_size(self) -> int:
        """The number of ranks of the role."""
        return self.mesh.world_size

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a registered method by its dispatch rule and wait for the result."""
        assert registration_of(method).blocking, (
            f"{method.__name__} is registered with blocking=False: use submit"
        )
        dispatch, sharded = self._deal("call", method, args, kwargs)
        found = self.backend.run(self.role, method.__name__, sharded.calls)
        result: R = dispatch.collect(found, self.mesh, sharded)
        return result

    def submit(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a registered method by its dispatch rule without waiting."""
        return self._submit("submit", method, args, kwargs)

    def call_and_keep(
        self,
        method: Callable[Concatenate[W, DataProto, P], DataProto],
        columns: Sequence[str],
        batch: DataProto,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> DataProto:
        """Call a method like `call`, and leave `columns`, all that it writes in this call, where they are.

        Returns them as remote columns: later calls on these rows read them there, and `fetch` brings them.
        """
        future = self.submit(method, batch, *args, **kwargs)
        future.wait()
        assert future.source is not None, "a call of a group has a source"
        order = future.source.sharded.order or [list(range(len(batch)))]
        shards = [future.parts[leader] for leader in self.mesh.leaders]
        return DataProto(remote={name: RemoteColumn.of_shards(shards, name, order) for name in columns})

    def keep(self, batch: DataProto, names: Sequence[str]) -> DataProto:
        """Return those of these columns that the batch has by value alone, as remote columns: later calls
        read them there, and they leave the driver once.
        """
        stored = {name for name, column in batch.remote.items() if column.is_complete}
        names = [name for name in names if name in batch and name not in stored]
        if not names:
            return DataProto()
        columns = batch.only(names)
        columns.remote = {}
        shard = self.backend.store(columns)
        whole = [range(len(batch))]
        copies = columns.tensors()
        remote = {name: RemoteColumn.of_shards([shard], name, whole, copies.get(name)) for name in names}
        return DataProto(remote=remote)

    def fetch(self, batch: DataProto, names: Collection[str] | None = None) -> DataProto:
        """Return the values of remote columns that the batch does not have by value, those in `names` (None:
        all), and nothing else of their shards.
        """
        wanted = sorted(batch.remote if names is None else {*names} & {*batch.remote})
        remote = {name: batch.remote[name] for name in wanted if name not in batch}
        if not remote:
            return DataProto()
        leaders = self.mesh.leaders
        sharded: dict[int, list[int]] = {}
        for row, shard in enumerate(next(iter(remote.values())).shard):
            sharded.setdefault(leaders[shard % len(leaders)], []).append(row)
        rows = DataProto(remote=remote)
        sharded = sharded or {leaders[0]: []}
        futures = [
            self.call_one(leader, Worker.stored, rows.select_idxs(own)) for leader, own in sharded.items()
        ]
        return undo_rows([future.result() for future in futures], list(sharded.values()))

    def call_list(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call an ALL_TO_LIST method with the same arguments everywhere; return the list of the leaders'
        results.
        """
        _, sharded = self._deal("call_list", method, args, kwargs)
        return self.backend.run(self.role, method.__name__, sharded.calls)

    def submit_list(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[list[R]]:
        """Call an ALL_TO_LIST method without waiting; its list can be passed on by reference."""
        return self._submit("submit_list", method, args, kwargs)

    def call_one(
        self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Call a registered method on one rank, whatever its dispatch rule is, in its own lane."""
        lane = registration_of(method).lane
        mesh = self.mesh
        assert 0 <= rank < mesh.world_size, f"{self.role} has no rank {rank}: there are {mesh.world_size}"
        everywhere = Dispatch.ONE_TO_ALL.split(
            resolve_futures(Call(args, dict(kwargs)), Dispatch.ONE_TO_ALL, mesh), mesh
        ).calls[rank]
        assert everywhere is not None, "ONE_TO_ALL calls every rank"
        calls: list[Call | None] = [None] * mesh.world_size
        calls[rank] = replace(everywhere, returns=True)
        sharded = ShardedCall(calls)
        parts = self.backend.submit(self.role, method.__name__, sharded.calls, lane)
        source = CallSource(Dispatch.RANK_ZERO, mesh, sharded)
        return Future(
            parts, lambda results: results[0], role=self.role, method=method.__name__, source=source
        )

    def call_each(
        self, method: Callable[Concatenate[W, ...], R], *args: Sequence[Any], **kwargs: Sequence[Any]
    ) -> list[R]:
        """Call an ALL_TO_ALL method; each argument is a list with one entry for each rank, and so is the
        result.
        """
        _, sharded = self._deal("call_each", method, args, kwargs)
        return self.backend.run(self.role, method.__name__, sharded.calls)

    def submit_each(
        self, method: Callable[Concatenate[W, ...], R], *args: Sequence[Any], **kwargs: Sequence[Any]
    ) -> Future[list[R]]:
        """Call an ALL_TO_ALL method without waiting; its list of results can be passed on by reference."""
        return self._submit("submit_each", method, args, kwargs)

    def columns_read(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """Return the batch with the columns that a call of `method` would send.

        Raises BatchError where one that the method declares is missing.
        """
        return registration_of(method).columns_read(batch, self._also_read.get(method.__name__, ()))

    def _deal(
        self, way: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Dispatch, ShardedCall]:
        """Return a method's rule, and the arguments as it shards them. Of rows, only the columns that the
        method reads are sent, and of those that are remote the places alone.

        Raises AssertionError where this way of calling does not fit the rule.
        """
        dispatch = registration_of(method).dispatch
        ways = ("call", "submit")
        if dispatch.per_rank:
            ways = ("call_each", "submit_each")
        elif dispatch.gives == "each":
            ways = ("call_list", "submit_list")
        assert way in ways, f"{method.__name__} is dispatched {dispatch.name}: use {' or '.join(ways)}"
        call = resolve_futures(Call(args, dict(kwargs)), dispatch, self.mesh)
        if not dispatch.deals_rows:
            return dispatch, dispatch.split(call, self.mesh)
        sharded = dispatch.split(_each_batch(call, lambda batch: self.columns_read(method, batch)), self.mesh)
        made: dict[tuple[int, int], Call] = {}
        calls: list[Call | None] = []
        for each in sharded.calls:
            if each is not None:
                if each.arguments_id not in made:  # ranks of a part go on sharing their arguments
                    made[each.arguments_id] = _each_batch(each, DataProto.by_reference)
                each = replace(made[each.arguments_id], returns=each.returns)
            calls.append(each)
        return dispatch, replace(sharded, calls=calls)

    def _submit(
        self, way: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        dispatch, sharded = self._deal(way, method, args, kwargs)
        mesh = self.mesh
        taken = tuple(rank for rank, each in enumerate(sharded.calls) if each is not None and each.returns)
        calls = sharded.calls
        # all ranks keep their results, so that the future can be passed on rank by rank
        if dispatch.gives == "first":
            calls = [each and replace(each, returns=True) for each in calls]
        parts = self.backend.submit(self.role, method.__name__, calls)
        return Future(
            parts,
            lambda results: dispatch.collect(results, mesh, sharded),
            role=self.role,
            method=method.__name__,
            taken=taken,
            source=CallSource(dispatch, mesh, sharded),
        )


def _each_batch(call: Call, change: Callable[[DataProto], Any]) -> Call:
    """Return the call with `change` applied to each batch among its arguments."""

    def changed(value: Any) -> Any:
        if isinstance(value, DataProto):
            return change(value)
        return value

    kwargs = {name: changed(value) for name, value in call.kwargs.items()}
    return replace(call, args=tuple(map(changed, call.args)), kwargs=kwargs)


def resolve_futures(call: Call, dispatch: Dispatch, mesh: MeshInfo) -> Call:
    """Replace each `Future` in a call, at any depth, by a value that `dispatch` can shard over the ranks of
    `mesh`: by reference where that means the same as by value. The kind of result decides (`Dispatch.gives`):

        first (ONE_TO_ALL)       that of the same rank, where both roles have as many; else that of rank 0
        first (one rank called)  all ranks get that rank's result
        each                     all ranks get the list, by reference; in a call with one entry for each
                                 rank, each gets its own entry
        anything else            the driver waits for the result and deals it as a value (rows that need not
                                 pass the driver are remote columns)
    """

    def top(value: Any) -> Any:
        passed = _anywhere(value, mesh)
        if isinstance(passed, PerRank) and dispatch.per_rank:
            return passed.values
        return passed

    args = tuple(map(top, call.args))
    kwargs = {name: top(value) for name, value in call.kwargs.items()}
    untouched = all(
        new is old
        for new, old in zip((*args, *kwargs.values()), (*call.args, *call.kwargs.values()), strict=True)
    )
    if untouched:
        return call
    return Call(args, kwargs, call.returns)


def _anywhere(value: Any, mesh: MeshInfo) -> Any:
    """Replace the futures inside a value."""
    found: dict[int, Any] = {}

    def note(future: Future[Any]) -> Future[Any]:
        found[id(future)] = _whole(future, mesh)
        return future

    replace_in(value, Future, note)
    by_rank = [passed for passed in found.values() if isinstance(passed, PerRank)]
    if not by_rank:
        return replace_in(value, Future, lambda future: found[id(future)])

    def on(rank: int) -> Any:
        def give(future: Future[Any]) -> Any:
            passed = found[id(future)]
            if isinstance(passed, PerRank):
                return passed.values[rank]
            return passed

        return replace_in(value, Future, give)

    return PerRank([on(rank) for rank in range(mesh.world_size)])


def _whole(future: Future[Any], mesh: MeshInfo) -> Any:
    """Return a future's whole value: its parts, to be passed by reference, or its result."""
    if future.source is None:
        return future.result()
    gives = future.source.dispatch.gives
    if gives == "each":
        return [future.parts[rank] for rank in future.taken]
    if gives == "first":
        if len(future.parts) == mesh.world_size:
            return PerRank([future.parts[rank] for rank in range(mesh.world_size)])
        return future.parts[future.taken[0]]
    return future.result()
