"""Dispatch rules: one call of the driver becomes a call on each rank, and their results become one result.

    group.update(batch) ──split──► rank 0: update(rows 0, 3, 4), rank 1: update(rows 1, 2) ──collect──► result

A rule is data on the method; no method is generated or looked up by name. Both halves of a rule get the mesh.
Along its `sp` and `tp` axes all ranks work on the same rows, and only the first of them, the leader, returns
a result.

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("responses", ...), writes=("values",))

Only the columns that a method reads travel to it, whatever else the caller's batch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

from hybridflow.controller.mesh import MeshInfo, PerRank, cut_rows, plan_rows, undo_rows
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.prompt import MEDIA

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    """The arguments of a method on one rank."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    returns: bool = True
    """False: the rank takes part, but its result stays there, and None comes back."""

    @property
    def arguments_id(self) -> tuple[int, int]:
        """A key that is equal for calls that share their arguments; valid as long as the calls exist."""
        return id(self.args), id(self.kwargs)

    def silent(self) -> Call:
        """Return a call with the same arguments and without a result."""
        return replace(self, returns=False)


@dataclass(frozen=True)
class ShardedCall:
    """A call after its arguments were distributed over the ranks."""

    calls: list[Call | None]
    """The call of each rank; None for a rank that is not called."""
    order: list[list[int]] | None = None
    """The rows of each part in the driver's numbering; None where none were sharded, or all to one part."""


Lane = Literal["ordered", "requests", "collect"]
"""The thread of a process in which a call runs: that of all ordered calls, that of requests beside it, or one
of two for polls (`collect`). Ordered calls and requests each keep their order.
"""

SplitFn = Callable[[Call, MeshInfo], ShardedCall]
"""A function from the driver's arguments to those of each rank."""

CollectFn = Callable[[list[Any], MeshInfo, ShardedCall], Any]
"""A function from the results of the ranks that return, in the order of ranks, to the driver's result."""


@dataclass(frozen=True)
class Dispatch:
    """A dispatch rule. The modes are attributes of the class, under verl's names."""

    name: str
    split: SplitFn
    collect: CollectFn
    gives: Literal["first", "each", "rows", "merged"]
    """The kind of result: the first rank's, a list of each leader's, rows in the driver's order, or all
    results merged.
    """
    deals_rows: bool = False
    """True: the rows of every DataProto among the arguments are sharded."""
    per_rank: bool = False
    """True: arguments and results are lists with one entry for each rank (`WorkerGroup.call_each`)."""

    ONE_TO_ALL: ClassVar[Dispatch]
    """The same arguments everywhere; the result is rank 0's."""
    ALL_TO_LIST: ClassVar[Dispatch]
    """The same arguments everywhere; the result lists the leaders' results (`WorkerGroup.call_list`)."""
    RANK_ZERO: ClassVar[Dispatch]
    """Only rank 0 is called."""
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    """The rows of all DataProto arguments are split by one plan, which balances their cost (`attention_mask`,
    `MeshInfo.workload`) and keeps rows of equal `group_ids` together. Other arguments go to every rank. Rows
    come back in the driver's order. A rank may get no rows.
    """
    DP_COMPUTE_METRICS: ClassVar[Dispatch]
    """Sharded like DP_COMPUTE_PROTO; each leader returns Metrics, which are merged."""
    ALL_TO_ALL: ClassVar[Dispatch]
    """Each argument is a list with one entry for each rank, and so is the result."""


@dataclass(frozen=True)
class Registration:
    """The attribute that `register` sets on a method."""

    dispatch: Dispatch
    blocking: bool
    reads: tuple[str, ...] | None = None
    """The columns that the method reads in every run; None for a method that is sent whole batches."""
    writes: tuple[str, ...] | None = None
    """The columns of which it returns some; None where any may come back."""
    lane: Lane = "ordered"

    @property
    def reads_with_tokens(self) -> tuple[str, ...]:
        """The columns that it reads with the tokens of rows, where a batch has them: media."""
        return (MEDIA,) if "input_ids" in (self.reads or ()) else ()

    def columns_read(self, batch: DataProto, also: Sequence[str] = ()) -> DataProto:
        """Return the batch with the columns that the method reads, and those of `also` that the batch has.

        The `row_id`, by which messages name a row, always comes along. Raises BatchError where a column that
        the method reads is missing.
        """
        if self.reads is None:
            return batch
        more = [name for name in ("row_id", *self.reads_with_tokens, *also) if batch.has(name)]
        return batch.only(dict.fromkeys([*self.reads, *more]))

    def check_written(self, result: Any) -> None:
        """Raise AssertionError where a batch that the method returned has a column that it does not write."""
        if self.writes is None or not isinstance(result, DataProto):
            return
        more = sorted({*result.names()} - {*self.writes})
        assert not more, (
            f"columns {more} are not among those that the method is registered to write: "
            f"{', '.join(self.writes)}"
        )


def register(
    dispatch_mode: Dispatch,
    blocking: bool = True,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    lane: Lane = "ordered",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a worker's method as callable by the driver, without a change to its static type.

    A method with `blocking=False` is called by `WorkerGroup.submit`, which returns a `Future` of its result.
    `reads` and `writes` name columns of the field table (`protocol/fields.py`). What a method reads in some
    runs only is said by the group of the run (`WorkerGroup`, `also_read`). A method of another `lane` than
    "ordered" runs beside the ordered calls, so it may only touch what is made for several threads; one rank
    is called at a time (`WorkerGroup.call_one`).
    """
    columns_read = None if reads is None else tuple(reads)
    columns_written = None if writes is None else tuple(writes)

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        found = Registration(dispatch_mode, blocking, columns_read, columns_written, lane)
        method.__registration__ = found  # type: ignore[attr-defined]
        return method

    return mark


def registration_of(method: Callable[..., Any]) -> Registration:
    """Return the registration of a method; raise AssertionError where it has none."""
    found = getattr(method, "__registration__", None)
    name = getattr(method, "__qualname__", repr(method))
    assert isinstance(found, Registration), (
        f"{name} cannot be called by the driver: mark it with @register(dispatch_mode=Dispatch.…)"
    )
    return found


# ---- from the driver's arguments to those of the ranks


def _values(call: Call) -> Iterator[Any]:
    yield from call.args
    yield from call.kwargs.values()


def _to_ranks(
    mesh: MeshInfo, call: Call, pieces: Mapping[int, list[DataProto]], *, returns: Callable[[int], bool]
) -> list[Call | None]:
    """Return a call for each rank; `pieces` has the parts of each batch by its id.

    The ranks of a part share their arguments.
    """
    special = [value for value in _values(call) if isinstance(value, PerRank)]
    made: dict[tuple[int, ...], Call] = {}
    calls: list[Call | None] = []
    for rank in range(mesh.world_size):
        part = mesh.part_of(rank)
        key = (part, *(id(value.values[rank]) for value in special))
        if key not in made:

            def own(value: Any, rank: int = rank, part: int = part) -> Any:
                if isinstance(value, PerRank):
                    return value.values[rank]
                if id(value) in pieces:
                    return pieces[id(value)][part]
                return value

            made[key] = Call(
                tuple(map(own, call.args)), {name: own(value) for name, value in call.kwargs.items()}
            )
        call_of_rank = made[key]
        if not returns(rank):
            call_of_rank = call_of_rank.silent()
        calls.append(call_of_rank)
    return calls


def _same(call: Call, mesh: MeshInfo, returns: Callable[[int], bool]) -> ShardedCall:
    if any(isinstance(value, PerRank) for value in _values(call)):
        return ShardedCall(_to_ranks(mesh, call, {}, returns=returns))
    silent = call.silent()
    return ShardedCall([call if returns(rank) else silent for rank in range(mesh.world_size)])


def _broadcast(call: Call, mesh: MeshInfo) -> ShardedCall:
    return _same(call, mesh, lambda rank: rank == 0)


def _broadcast_to_leaders(call: Call, mesh: MeshInfo) -> ShardedCall:
    return _same(call, mesh, mesh.is_leader)


def _rank_zero(call: Call, mesh: MeshInfo) -> ShardedCall:
    return ShardedCall([_broadcast(call, mesh).calls[0], *[None] * (mesh.world_size - 1)])


def _shard_rows(call: Call, mesh: MeshInfo) -> ShardedCall:
    batches = [value for value in _values(call) if isinstance(value, DataProto)]
    assert batches, "no DataProto among the arguments: nothing to deal"
    if mesh.num_parts == 1:
        return _same(call, mesh, mesh.is_leader)
    order = plan_rows(batches, mesh)
    pieces = {id(batch): cut_rows(batch, order) for batch in batches}
    return ShardedCall(_to_ranks(mesh, call, pieces, returns=mesh.is_leader), order)


def _one_entry_a_rank(call: Call, mesh: MeshInfo) -> ShardedCall:
    n = mesh.world_size
    named = {**{f"argument {index}": value for index, value in enumerate(call.args)}, **call.kwargs}
    for name, value in named.items():
        assert isinstance(value, list | tuple), (
            f"{name} must be a list with one entry for each rank, got {type(value).__name__}"
        )
        assert len(value) == n, f"{name} has {len(value)} entries for {n} ranks"
    return ShardedCall(
        [
            Call(
                tuple(value[rank] for value in call.args),
                {key: value[rank] for key, value in call.kwargs.items()},
            )
            for rank in range(n)
        ]
    )


# ---- from the ranks' results to the driver's


def _first(results: list[Any], mesh: MeshInfo, sharded: ShardedCall) -> Any:
    return results[0]


def _all(results: list[Any], mesh: MeshInfo, sharded: ShardedCall) -> Any:
    return results


def _rows_in_order(results: list[Any], mesh: MeshInfo, sharded: ShardedCall) -> DataProto:
    odd = sorted({type(part).__name__ for part in results if not isinstance(part, DataProto)})
    assert not odd, f"a DP_COMPUTE_PROTO method must return a DataProto, got {odd}"
    if sharded.order is None:  # there is one part: its tensors come back without a copy
        rows: DataProto = results[0]
        return rows
    return undo_rows(results, sharded.order)


def _merge_metrics(results: list[Any], mesh: MeshInfo, sharded: ShardedCall) -> Metrics:
    odd = sorted({type(part).__name__ for part in results if not isinstance(part, Metrics)})
    assert not odd, f"a DP_COMPUTE_METRICS method must return Metrics, got {odd}"
    return Metrics.merge(results)


Dispatch.ONE_TO_ALL = Dispatch("ONE_TO_ALL", _broadcast, _first, "first")
Dispatch.ALL_TO_LIST = Dispatch("ALL_TO_LIST", _broadcast_to_leaders, _all, "each")
Dispatch.RANK_ZERO = Dispatch("RANK_ZERO", _rank_zero, _first, "first")
Dispatch.DP_COMPUTE_PROTO = Dispatch("DP_COMPUTE_PROTO", _shard_rows, _rows_in_order, "rows", True)
Dispatch.DP_COMPUTE_METRICS = Dispatch("DP_COMPUTE_METRICS", _shard_rows, _merge_metrics, "merged", True)
Dispatch.ALL_TO_ALL = Dispatch("ALL_TO_ALL", _one_entry_a_rank, _all, "each", per_rank=True)
