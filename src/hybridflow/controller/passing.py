"""Results of one call as arguments of another, by reference where that means the same as by value.

What a `Future` among the arguments becomes:

    result made of           the ranks get
    first (ONE_TO_ALL)       each its own rank's result, where both roles have as many ranks; else all get
    rank 0's
    first (one rank called)  all get that rank's result
    each                     all get the list, by reference; of a call with one entry a rank: each its own
    entry
    rows, items              each the result of its part, where the call deals as many parts, which then
    follows the same plan
    anything else            the driver waits for it, and it is dealt as a value
"""

from __future__ import annotations

from typing import Any

from hybridflow.controller.dealing import PerRank
from hybridflow.controller.dispatch import Call, Dispatch
from hybridflow.controller.future import Future, replace
from hybridflow.controller.mesh import MeshInfo


def pass_on(call: Call, dispatch: Dispatch, mesh: MeshInfo) -> Call:
    """The call with each `Future` in it, at any depth, replaced by what `dispatch` can deal to the ranks of
    `mesh`.
    """
    plans: list[list[list[int]]] = []  # of rows or items that are passed on: all must have been dealt alike

    def top(value: Any, position: int | None) -> Any:
        dealt = dispatch.takes == "rows" or (dispatch.takes == "items" and position == 0)
        passed = (
            _passed(value, dispatch, mesh, plans)
            if isinstance(value, Future) and dealt
            else _anywhere(value, mesh)
        )
        return passed.values if isinstance(passed, PerRank) and dispatch.per_rank else passed

    args = tuple(top(value, index) for index, value in enumerate(call.args))
    kwargs = {name: top(value, None) for name, value in call.kwargs.items()}
    untouched = all(
        new is old
        for new, old in zip((*args, *kwargs.values()), (*call.args, *call.kwargs.values()), strict=True)
    )
    return call if untouched else Call(args, kwargs, call.returns)


def _passed(future: Future[Any], dispatch: Dispatch, mesh: MeshInfo, plans: list[list[list[int]]]) -> Any:
    """A future in the place of rows or items that are dealt."""
    source = future.source
    if source is None or source.dispatch.gives != dispatch.takes:
        return (
            _anywhere(future, mesh)
            if source is not None and source.dispatch.gives == "first"
            else future.result()
        )
    order = source.dealt.order
    if source.mesh.num_parts != mesh.num_parts or (
        order is not None and any(order != plan for plan in plans)
    ):
        return future.result()
    if order is not None:
        plans.append(order)
    return PerRank(
        [future.parts[source.mesh.leaders[mesh.part_of(rank)]] for rank in range(mesh.world_size)], order
    )


def _anywhere(value: Any, mesh: MeshInfo) -> Any:
    """A value that goes to all ranks alike, with the futures inside replaced."""
    found: dict[int, Any] = {}

    def note(future: Future[Any]) -> Future[Any]:
        found[id(future)] = _whole(future, mesh)
        return future

    replace(value, Future, note)
    by_rank = [passed for passed in found.values() if isinstance(passed, PerRank)]
    if not by_rank:
        return replace(value, Future, lambda future: found[id(future)])

    def on(rank: int) -> Any:
        def give(future: Future[Any]) -> Any:
            passed = found[id(future)]
            return passed.values[rank] if isinstance(passed, PerRank) else passed

        return replace(value, Future, give)

    return PerRank([on(rank) for rank in range(mesh.world_size)])


def _whole(future: Future[Any], mesh: MeshInfo) -> Any:
    """A future's whole value: parts by reference, or what it resolves to."""
    gives = None if future.source is None else future.source.dispatch.gives
    if gives == "each":
        return [future.parts[rank] for rank in future.taken]
    if gives == "first":
        everywhere = len(future.parts) == mesh.world_size
        return (
            PerRank([future.parts[rank] for rank in range(mesh.world_size)])
            if everywhere
            else future.parts[future.taken[0]]
        )
    if gives in ("rows", "items") and len(future.taken) == 1:
        return future.parts[future.taken[0]]
    return future.result()
