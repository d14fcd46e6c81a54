from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridflow.controller import Call, Dispatch, Future, MeshInfo, Part, ShardedCall
from hybridflow.controller.mesh import cut_items, plan_items
from hybridflow.errors import WorkerError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto, Workload

MESH = MeshInfo(world_size=3)
GRID = MeshInfo(world_size=4, axes=(("dp", 2), ("sp", 2)), workload=Workload())
COSTS = MeshInfo(world_size=2, workload=Workload())


@dataclass(frozen=True)
class Request:
    """An item that says what it costs and with which others it stays."""

    number: int
    deal_key: str
    deal_cost: float


def rows(n: int, **columns: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n), **columns})


def masks(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]


def called(sharded: ShardedCall) -> list[Call]:
    return [call for call in sharded.calls if call is not None]


def test_a_mesh_knows_its_parts_and_leaders() -> None:
    assert [MESH.part_of(rank) for rank in range(3)] == [0, 1, 2] and MESH.leaders == (0, 1, 2)
    assert (
        GRID.num_parts == 2
        and [GRID.part_of(rank) for rank in range(4)] == [0, 0, 1, 1]
        and GRID.leaders == (0, 2)
    )
    tp_first = MeshInfo(8, (("tp", 2), ("replica", 2), ("dp", 2)))
    assert [tp_first.part_of(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3] and tp_first.leaders == (
        0,
        1,
        2,
        3,
    )
    with pytest.raises(AssertionError, match="make 4 ranks, not 3"):
        MeshInfo(3, (("dp", 2), ("tp", 2)))


@pytest.mark.parametrize(("n", "sizes"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1, 0])])
def test_rows_are_dealt_unevenly_and_joined_in_order(n: int, sizes: list[int]) -> None:
    sharded = Dispatch.DP_COMPUTE_PROTO.split(Call((rows(n), "same"), {"more": rows(n), "flag": True}), MESH)
    calls = called(sharded)
    assert [len(call.args[0]) for call in calls] == sizes
    assert [len(call.kwargs["more"]) for call in calls] == sizes
    assert all(call.args[1] == "same" and call.kwargs["flag"] is True for call in calls)
    joined = Dispatch.DP_COMPUTE_PROTO.collect([call.args[0] for call in calls], MESH, sharded)
    assert joined.batch["x"].tolist() == list(range(n))


def test_rows_are_dealt_by_what_they_cost() -> None:
    batch = rows(4, attention_mask=masks(9, 1, 3, 5))
    sharded = Dispatch.DP_COMPUTE_PROTO.split(Call((batch,), {"more": rows(4)}), COSTS)
    first, second = called(sharded)
    assert first.args[0].batch["x"].tolist() == [0] and second.args[0].batch["x"].tolist() == [1, 2, 3]
    assert second.kwargs["more"].batch["x"].tolist() == [1, 2, 3]
    swapped = [DataProto.from_dict({"y": call.args[0].batch["x"] * 10}) for call in (first, second)]
    assert Dispatch.DP_COMPUTE_PROTO.collect(swapped, COSTS, sharded).batch["y"].tolist() == [0, 10, 20, 30]
    quadratic = MeshInfo(2, workload=Workload(0.0, 1.0))  # 81 against 36 + 16 + 16
    again = Dispatch.DP_COMPUTE_PROTO.split(Call((rows(4, attention_mask=masks(9, 6, 4, 4)),)), quadratic)
    assert [call.args[0].batch["x"].tolist() for call in called(again)] == [[0], [1, 2, 3]]


def test_groups_stay_whole() -> None:
    group_ids = torch.tensor([4, 7, 4, 7, 9, 9])
    for mesh in (COSTS, MeshInfo(2)):
        sharded = Dispatch.DP_COMPUTE_METRICS.split(
            Call((rows(6, attention_mask=masks(5, 1, 5, 1, 4, 4), group_ids=group_ids),)), mesh
        )
        held = [set(call.args[0].batch["group_ids"].tolist()) for call in called(sharded)]
        assert not held[0] & held[1] and held[0] | held[1] == {4, 7, 9}
        assert sorted(len(call.args[0]) for call in called(sharded)) == [2, 4]


def test_one_part_keeps_its_tensors() -> None:
    batch = rows(4, attention_mask=masks(9, 1, 3, 5))
    sharded = Dispatch.DP_COMPUTE_PROTO.split(Call((batch,)), MeshInfo(1, workload=Workload()))
    assert called(sharded)[0].args[0] is batch and sharded.order is None
    assert Dispatch.DP_COMPUTE_PROTO.collect([batch], MeshInfo(1), sharded) is batch


def test_ranks_of_a_part_share_arguments_and_only_leaders_return() -> None:
    batch = rows(4, attention_mask=masks(9, 1, 3, 5))
    calls = called(Dispatch.DP_COMPUTE_PROTO.split(Call((batch,), {"flag": True}), GRID))
    assert [call.returns for call in calls] == [True, False, True, False]
    assert calls[0].arguments_id == calls[1].arguments_id != calls[2].arguments_id == calls[3].arguments_id
    everywhere = called(Dispatch.ALL_TO_LIST.split(Call(("x",)), GRID))
    assert [call.returns for call in everywhere] == [True, False, True, False]
    assert len({call.arguments_id for call in everywhere}) == 1


def test_rules_refuse_what_they_cannot_deal_or_join() -> None:
    split, collect = Dispatch.DP_COMPUTE_PROTO.split, Dispatch.DP_COMPUTE_PROTO.collect
    with pytest.raises(AssertionError, match="nothing to deal"):
        split(Call(("text",)), MESH)
    with pytest.raises(AssertionError, match=r"they have \[2, 3\] rows"):
        split(Call((rows(2), rows(3))), MESH)
    sharded = split(Call((rows(3),)), MESH)
    with pytest.raises(AssertionError, match="must return a DataProto"):
        collect([rows(1), None, rows(1)], MESH, sharded)
    with pytest.raises(AssertionError, match=r"given \[1, 1, 1\] rows and returned \[1, 2, 1\]"):
        collect([rows(1), rows(2), rows(1)], MESH, sharded)
    with pytest.raises(AssertionError, match="must return Metrics"):
        Dispatch.DP_COMPUTE_METRICS.collect([{}], MESH, sharded)


def test_items_are_dealt_by_cost_with_their_kin() -> None:
    requests = [Request(0, "a", 3.0), Request(1, "b", 5.0), Request(2, "a", 3.0), Request(3, "c", 1.0)]
    plan = plan_items(requests, COSTS)
    assert plan == [[0, 2], [1, 3]]
    assert cut_items(requests, plan) == [[requests[0], requests[2]], [requests[1], requests[3]]]
    assert plan_items(requests, MeshInfo(2)) == [[0, 2], [1, 3]], "without costs they are dealt by number"


def test_metrics_of_ranks_are_weighted_by_their_counts() -> None:
    parts = []
    for numerator, denominator in ((3.0, 10.0), (1.0, 30.0)):
        part = Metrics()
        part.add_mean("clipfrac", numerator, denominator)
        parts.append(part)
    assert Dispatch.DP_COMPUTE_METRICS.collect(parts, MESH, ShardedCall([])).to_floats() == {"clipfrac": 0.1}


def test_rank_zero_leaves_the_others_alone() -> None:
    call = Call(("a",))
    assert Dispatch.RANK_ZERO.split(call, MESH).calls == [call, None, None]
    assert Dispatch.ONE_TO_ALL.split(call, MESH).calls == [call, call.silent(), call.silent()]
    assert Dispatch.ONE_TO_ALL.collect(["zero"], MESH, ShardedCall([])) == "zero"


def test_all_to_all_hands_out_one_entry_each() -> None:
    sharded = Dispatch.ALL_TO_ALL.split(Call((["a", "b", "c"],), {"n": [1, 2, 3]}), MESH)
    assert sharded.calls == [Call(("a",), {"n": 1}), Call(("b",), {"n": 2}), Call(("c",), {"n": 3})]


def future_of(parts: dict[int, Part]) -> Future[list[int]]:
    return Future(parts, lambda results: list(results), role="actor", method="update")


def test_a_wait_has_a_name_and_a_deadline() -> None:
    parts: dict[int, Part] = {rank: concurrent.futures.Future() for rank in range(3)}
    parts[0].set_result(1)
    future = future_of(parts)
    assert not future.done()
    with pytest.raises(
        WorkerError, match=r"actor\.update has not finished after 0\.01 s on ranks \[1, 2\]"
    ) as caught:
        future.result(timeout=0.01)
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("actor", 1, "update")
    parts[1].set_result(2)
    parts[2].set_result(3)
    assert future.result() == [1, 2, 3]


def test_the_first_failing_rank_is_raised_while_others_still_run() -> None:
    parts: dict[int, Part] = {rank: concurrent.futures.Future() for rank in range(3)}
    parts[2].set_exception(ValueError("rank two"))
    with pytest.raises(ValueError, match="rank two"):
        future_of(parts).result()
