"""Results of one call as arguments of another, by reference where that means the same as by value.

A `Future` among the arguments is replaced by the kind of result that it has (`Dispatch.gives`):

    first (ONE_TO_ALL)       each rank gets the result of the same rank where both roles have equally many
                             ranks; else all get that of rank 0
    first (one rank called)  all ranks get that rank's result
    each                     all ranks get the list, by reference; in a call with one entry for each rank,
    each
                             gets its own entry
    anything else            the driver waits for the result and deals it as a value (rows that need not pass
                             the driver are remote columns)
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
    return future.result()
