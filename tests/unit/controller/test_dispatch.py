from __future__ import annotations

import concurrent.futures

import pytest
import torch

from hybridflow.controller.dispatch import Call, Dispatch, MeshInfo
from hybridflow.controller.future import Future, Part
from hybridflow.errors import WorkerError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

MESH = MeshInfo(world_size=3)


def rows(n: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n)})


@pytest.mark.parametrize(("n", "sizes"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1, 0])])
def test_rows_are_dealt_unevenly_and_joined_in_order(n: int, sizes: list[int]) -> None:
    calls = Dispatch.DP_COMPUTE_PROTO.split(Call((rows(n), "same"), {"more": rows(n), "flag": True}), MESH)
    assert [len(call.args[0]) for call in calls if call] == sizes
    assert [len(call.kwargs["more"]) for call in calls if call] == sizes
    assert all(call is not None and call.args[1] == "same" and call.kwargs["flag"] is True for call in calls)
    joined = Dispatch.DP_COMPUTE_PROTO.collect([call.args[0] for call in calls if call], MESH)
    assert joined.batch["x"].tolist() == list(range(n))


def test_rules_refuse_what_they_cannot_deal_or_join() -> None:
    with pytest.raises(AssertionError, match="nothing to deal"):
        Dispatch.DP_COMPUTE_PROTO.split(Call(("text",)), MESH)
    with pytest.raises(AssertionError, match="must return a DataProto"):
        Dispatch.DP_COMPUTE_PROTO.collect([rows(1), None, rows(1)], MESH)
    with pytest.raises(AssertionError, match="must return Metrics"):
        Dispatch.DP_COMPUTE_METRICS.collect([{}], MESH)


def test_metrics_of_ranks_are_weighted_by_their_counts() -> None:
    parts = []
    for numerator, denominator in ((3.0, 10.0), (1.0, 30.0)):
        part = Metrics()
        part.add_mean("clipfrac", numerator, denominator)
        parts.append(part)
    assert Dispatch.DP_COMPUTE_METRICS.collect(parts, MESH).to_floats() == {"clipfrac": 0.1}


def test_rank_zero_leaves_the_others_alone() -> None:
    call = Call(("a",))
    assert Dispatch.RANK_ZERO.split(call, MESH) == [call, None, None]
    assert Dispatch.ONE_TO_ALL.split(call, MESH) == [call, call, call]
    assert Dispatch.ONE_TO_ALL.collect(["zero", "one", "two"], MESH) == "zero"


def test_all_to_all_hands_out_one_entry_each() -> None:
    calls = Dispatch.ALL_TO_ALL.split(Call((["a", "b", "c"],), {"n": [1, 2, 3]}), MESH)
    assert calls == [Call(("a",), {"n": 1}), Call(("b",), {"n": 2}), Call(("c",), {"n": 3})]


def future_of(parts: dict[int, Part]) -> Future[list[int]]:
    return Future(parts, lambda results: list(results), role="actor", method="update")


def test_a_wait_has_a_name_and_a_deadline() -> None:
    parts: dict[int, Part] = {rank: concurrent.futures.Future() for rank in range(3)}
    parts[0].set_result(1)
    future = future_of(parts)
    assert not future.done()
    with pytest.raises(WorkerError, match=r"actor\.update has not finished after 0\.01 s on ranks \[1, 2\]") as caught:
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
