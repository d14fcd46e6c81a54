"""Results of one call as arguments of another, by reference where that means the same as by value.

A `Future` among the arguments is replaced by the kind of result that it has (`Dispatch.gives`):

    first (ONE_TO_ALL)       each rank gets the result of the same rank where both roles have equally many
                             ranks; else all get that of rank 0
    first (one rank called)  all ranks get that rank's result
    each                     all ranks get the list, by reference; in a call with one entry for each rank,
    each
                             gets its own entry
    rows, items              each rank gets the result of its part where both calls have equally many parts;
                             the second call then follows the plan of the first
    anything else            the driver waits for the result and deals it as a value
"""

from __future__ import annotations

from typing import Any

from hybridflow.controller.dealing import PerRank
from hybridflow.controller.dispatch import Call, Dispatch
from hybridflow.controller.future import Future, replace
from hybridflow.controller.mesh import MeshInfo


def pass_on(call: Call, dispatch: Dispatch, mesh: MeshInfo) -> Call:
    """Replace each `Future` in a call, at any depth, by a value that `dispatch` can deal to the ranks of
    `mesh`.
    """
    plans: list[
        list[list[int]]
    ] = []  # the plans of all rows and items that are passed on, which must be equal

    def top(value: Any, position: int | None) -> Any:
        dealt = dispatch.takes == "rows" or (dispatch.takes == "items" and position == 0)
        if isinstance(value, Future) and dealt:
            passed = _passed(value, dispatch, mesh, plans)
        else:
            passed = _anywhere(value, mesh)
        if isinstance(passed, PerRank) and dispatch.per_rank:
            return passed.values
        return passed

    args = tuple(top(value, index) for index, value in enumerate(call.args))
    kwargs = {name: top(value, None) for name, value in call.kwargs.items()}
    untouched = all(
        new is old
        for new, old in zip((*args, *kwargs.values()), (*call.args, *call.kwargs.values()), strict=True)
    )
    if untouched:
        return call
    return Call(args, kwargs, call.returns)


def _passed(future: Future[Any], dispatch: Dispatch, mesh: MeshInfo, plans: list[list[list[int]]]) -> Any:
    """Return the value for a future whose rows or items are dealt."""
    source = future.source
    if source is None:
        return future.result()
    if source.dispatch.gives == "first":
        return _anywhere(future, mesh)
    if source.dispatch.gives != dispatch.takes:
        return future.result()
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
    """Replace the futures inside a value that is not dealt but goes to all ranks."""
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
            if isinstance(passed, PerRank):
                return passed.values[rank]
            return passed

        return replace(value, Future, give)

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
    if gives in ("rows", "items") and len(future.taken) == 1:
        return future.parts[future.taken[0]]
    return future.result()
