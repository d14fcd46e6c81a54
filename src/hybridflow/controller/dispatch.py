"""How one call of the driver becomes a call on each rank, and how the ranks' results become one result.

    driver: group.update(batch) ──split──► rank 0: update(rows 0..3), rank 1: update(rows 4..6) ──collect──► one result

A rule is data on the method (`@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)`); nothing is generated and nothing bound by name.
Both halves of a rule are handed the mesh, so that a rule for an n-d mesh, in which only the data-parallel leaders of a
tensor-, pipeline- or sequence-parallel group return rows, is another instance of `Dispatch` and no other code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, ParamSpec, TypeVar

from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class MeshInfo:
    """The ranks of a worker group and how they are arranged."""

    world_size: int
    axes: tuple[tuple[str, int], ...] = ()
    """Name and size of each axis, slowest first, for example (("dp", 4), ("tp", 2)); empty: data parallel only."""


@dataclass(frozen=True)
class Call:
    """The arguments of a method on one rank."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


SplitFn = Callable[[Call, MeshInfo], list[Call | None]]
"""The driver's arguments -> those of each rank, None for a rank that is not called."""

CollectFn = Callable[[list[Any], MeshInfo], Any]
"""Results of the called ranks, in the order of ranks -> the driver's result."""


@dataclass(frozen=True)
class Dispatch:
    """A rule. The modes stand on the class, under the names that the field knows."""

    name: str
    split: SplitFn
    collect: CollectFn
    per_rank: bool = False
    """True: arguments and results are lists with one entry a rank (`WorkerGroup.call_each`)."""

    ONE_TO_ALL: ClassVar[Dispatch]
    """The same arguments everywhere; the result is rank 0's."""
    RANK_ZERO: ClassVar[Dispatch]
    """Only rank 0 is called."""
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    """DataProto arguments are dealt in chunks whose sizes differ by at most one row, others go everywhere; rows come back in order."""
    DP_COMPUTE_METRICS: ClassVar[Dispatch]
    """Dealt like DP_COMPUTE_PROTO; each rank returns Metrics, which are merged."""
    ALL_TO_ALL: ClassVar[Dispatch]
    """Each argument is a list with one entry a rank; so is the result."""


@dataclass(frozen=True)
class Registration:
    """What `register` leaves on a method."""

    dispatch: Dispatch
    blocking: bool


def register(dispatch_mode: Dispatch, blocking: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a worker's method as callable by the driver; its static type stays as it is.

    With `blocking=False` the driver must not wait for it in place: `WorkerGroup.submit` gives a `Future` of its result.
    """

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        method.__registration__ = Registration(dispatch_mode, blocking)  # type: ignore[attr-defined]
        return method

    return mark


def registration_of(method: Callable[..., Any]) -> Registration:
    """The rule of a method; an AssertionError for one without."""
    found = getattr(method, "__registration__", None)
    name = getattr(method, "__qualname__", repr(method))
    assert isinstance(found, Registration), f"{name} cannot be called by the driver: mark it with @register(dispatch_mode=Dispatch.…)"
    return found


def _broadcast(call: Call, mesh: MeshInfo) -> list[Call | None]:
    return [call] * mesh.world_size


def _rank_zero(call: Call, mesh: MeshInfo) -> list[Call | None]:
    return [call, *[None] * (mesh.world_size - 1)]


def _deal_rows(call: Call, mesh: MeshInfo) -> list[Call | None]:
    n = mesh.world_size
    args = [_chunks(value, n) for value in call.args]
    kwargs = {key: _chunks(value, n) for key, value in call.kwargs.items()}
    values = [*call.args, *call.kwargs.values()]
    assert any(isinstance(value, DataProto) for value in values), "no DataProto among the arguments: nothing to deal"
    return [Call(tuple(part[rank] for part in args), {key: part[rank] for key, part in kwargs.items()}) for rank in range(n)]


def _chunks(value: Any, n: int) -> Sequence[Any]:
    return value.chunk(n) if isinstance(value, DataProto) else [value] * n


def _one_entry_a_rank(call: Call, mesh: MeshInfo) -> list[Call | None]:
    n = mesh.world_size
    named = {**{f"argument {index}": value for index, value in enumerate(call.args)}, **call.kwargs}
    for name, value in named.items():
        assert isinstance(value, list | tuple), f"{name} must be a list with one entry a rank, got {type(value).__name__}"
        assert len(value) == n, f"{name} has {len(value)} entries for {n} ranks"
    return [Call(tuple(value[rank] for value in call.args), {key: value[rank] for key, value in call.kwargs.items()}) for rank in range(n)]


def _first(results: list[Any], mesh: MeshInfo) -> Any:
    return results[0]


def _all(results: list[Any], mesh: MeshInfo) -> Any:
    return results


def _concat_rows(results: list[Any], mesh: MeshInfo) -> DataProto:
    odd = sorted({type(part).__name__ for part in results if not isinstance(part, DataProto)})
    assert not odd, f"a DP_COMPUTE_PROTO method must return a DataProto, got {odd}"
    return results[0] if len(results) == 1 else DataProto.concat(results)  # one rank: its tensors as they are, without a copy


def _merge_metrics(results: list[Any], mesh: MeshInfo) -> Metrics:
    odd = sorted({type(part).__name__ for part in results if not isinstance(part, Metrics)})
    assert not odd, f"a DP_COMPUTE_METRICS method must return Metrics, got {odd}"
    return Metrics.merge(results)


Dispatch.ONE_TO_ALL = Dispatch("ONE_TO_ALL", _broadcast, _first)
Dispatch.RANK_ZERO = Dispatch("RANK_ZERO", _rank_zero, _first)
Dispatch.DP_COMPUTE_PROTO = Dispatch("DP_COMPUTE_PROTO", _deal_rows, _concat_rows)
Dispatch.DP_COMPUTE_METRICS = Dispatch("DP_COMPUTE_METRICS", _deal_rows, _merge_metrics)
Dispatch.ALL_TO_ALL = Dispatch("ALL_TO_ALL", _one_entry_a_rank, _all, per_rank=True)
