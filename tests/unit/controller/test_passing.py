"""Results as arguments: by reference where both calls deal alike, by value where not."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
import torch

from hybridflow.controller import Call, Dispatch, Future, MeshInfo, Part
from hybridflow.controller.backend import CallSource
from hybridflow.controller.worker_group import resolve_futures
from hybridflow.protocol import DataProto, Workload

FOUR = MeshInfo(4)
GRID = MeshInfo(4, (("dp", 2), ("tp", 2)), Workload())
PAIR = MeshInfo(2, workload=Workload())


def rows(*lengths: int) -> DataProto:
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return DataProto.from_dict({"x": torch.arange(len(lengths)), "attention_mask": mask})


def future(dispatch: Dispatch, mesh: MeshInfo, call: Call, results: list[Any] | None = None) -> Future[Any]:
    """Of a call that every rank it went to answered: with `results`, or the rank's own first argument."""
    sharded = dispatch.split(call, mesh)
    parts: dict[int, Part] = {}
    for rank, each in enumerate(sharded.calls):
        if each is not None:
            parts[rank] = concurrent.futures.Future()
            parts[rank].set_result(each.args[0] if results is None else results[rank])
    taken = tuple(rank for rank, each in enumerate(sharded.calls) if each is not None and each.returns)
    source = CallSource(dispatch, mesh, sharded)
    return Future(
        parts,
        lambda found: dispatch.collect(found, mesh, sharded),
        role="a",
        method="m",
        taken=taken,
        source=source,
    )


def test_rows_are_dealt_anew_as_values() -> None:
    batch = rows(9, 1, 3, 5)
    by_number = future(Dispatch.DP_COMPUTE_PROTO, MeshInfo(2), Call((batch,)))
    call = resolve_futures(Call((by_number,), {"more": batch}), Dispatch.DP_COMPUTE_PROTO, PAIR)
    calls = [call for call in Dispatch.DP_COMPUTE_PROTO.split(call, PAIR).calls if call]
    for name in (0, "more"):
        found = [each.args[0] if name == 0 else each.kwargs["more"] for each in calls]
        assert [part.batch["x"].tolist() for part in found] == [[0], [1, 2, 3]]


@pytest.mark.parametrize("nested", [False, True])
def test_a_result_of_every_rank_goes_rank_by_rank_where_there_are_as_many(nested: bool) -> None:
    earlier = future(Dispatch.ONE_TO_ALL, FOUR, Call(("x",)), ["a", "b", "c", "d"])
    call = Call(({"state": [earlier]} if nested else earlier, "same"))

    def first(rank_call: Call | None) -> Any:
        assert rank_call is not None and rank_call.args[1] == "same"
        return rank_call.args[0]["state"][0] if nested else rank_call.args[0]

    same = Dispatch.ONE_TO_ALL.split(resolve_futures(call, Dispatch.ONE_TO_ALL, GRID), GRID)
    assert [first(rank_call) for rank_call in same.calls] == [earlier.parts[rank] for rank in range(4)]
    fewer = Dispatch.ONE_TO_ALL.split(resolve_futures(call, Dispatch.ONE_TO_ALL, PAIR), PAIR)
    assert [first(rank_call) for rank_call in fewer.calls] == [earlier.parts[0]] * 2
    with_rows = Dispatch.DP_COMPUTE_PROTO.split(
        resolve_futures(Call((rows(1, 1), earlier)), Dispatch.DP_COMPUTE_PROTO, GRID), GRID
    )
    assert [rank_call.args[1] for rank_call in with_rows.calls if rank_call] == [
        earlier.parts[rank] for rank in range(4)
    ]


def test_a_list_goes_to_all_or_entry_by_entry() -> None:
    earlier = future(Dispatch.ALL_TO_ALL, PAIR, Call((["a", "b"],)))
    everywhere = Dispatch.ONE_TO_ALL.split(resolve_futures(Call((earlier,)), Dispatch.ONE_TO_ALL, GRID), GRID)
    assert [call.args[0] for call in everywhere.calls if call] == [[earlier.parts[0], earlier.parts[1]]] * 4
    assert len({call.arguments_id for call in everywhere.calls if call}) == 1
    each = Dispatch.ALL_TO_ALL.split(resolve_futures(Call((earlier,)), Dispatch.ALL_TO_ALL, PAIR), PAIR)
    assert [call.args[0] for call in each.calls if call] == [earlier.parts[0], earlier.parts[1]]
    leaders = future(Dispatch.ALL_TO_LIST, GRID, Call(("x",)), ["a", "b", "c", "d"])
    assert resolve_futures(Call((leaders,)), Dispatch.ONE_TO_ALL, PAIR).args[0] == [
        leaders.parts[0],
        leaders.parts[2],
    ]
    ranks = future(Dispatch.ONE_TO_ALL, PAIR, Call(("x",)), ["a", "b"])
    assert resolve_futures(Call((ranks,)), Dispatch.ALL_TO_ALL, PAIR).args[0] == [
        ranks.parts[0],
        ranks.parts[1],
    ]


def test_a_call_without_futures_stays_as_it_is() -> None:
    call = Call((rows(1), [1, {"a": 2}]), {"b": 3})
    assert resolve_futures(call, Dispatch.DP_COMPUTE_PROTO, PAIR) is call
