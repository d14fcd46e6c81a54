"""Boxes and plans: pure numbers, for any number of ranks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hybridflow.distributed.boxes import Box, box_at
from hybridflow.weight_sync.plan import Parameter, Plan, make_plan

FP32 = torch.float32


def grid(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list) -> list[Box]:  # type: ignore[type-arg]
    return [box_at(shape, mesh, placements, place) for place in itertools.product(*map(range, mesh))]


def deliver(
    plan: Plan, held: list[dict[str, Box]], wanted: list[dict[str, Box]], tensors: dict[str, torch.Tensor]
) -> list[list[int]]:
    """Carry a plan out in memory; bytes that each rank sent to each."""
    out = [{name: torch.full(box.shape, -1.0) for name, box in boxes.items()} for boxes in wanted]
    moved = [[0] * len(held) for _ in held]
    for each in plan.rounds:
        for name, routes in each.pieces:
            for source, target, box in routes:
                part = tensors[name][held[source][name].within(Box.whole(tensors[name].shape))]
                out[target][name][box.within(wanted[target][name])] = part[box.within(held[source][name])]
                moved[source][target] += (source != target) * box.numel * each.dtype.itemsize
    for got, boxes in zip(out, wanted):
        for name, box in boxes.items():
            assert torch.equal(got[name], tensors[name][box.within(Box.whole(tensors[name].shape))]), name
    return moved


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), [Shard(0)]),
        ((7,), [Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((3, 2), [Shard(0), Shard(1)]),
        ((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 3), [Shard(0), Replicate()]),
        ((5,), [Replicate()]),
    ],
)
@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_everybody_gets_what_it_wants_and_nothing_it_has(
    mesh: tuple[int, ...], placements: list, bucket: int
) -> None:  # type: ignore[type-arg]
    shapes = {"a": (11, 6), "b": (6, 10), "c": (5, 4)}
    boxes = {name: grid(shape, mesh, placements) for name, shape in shapes.items()}
    ranks = len(boxes["a"])
    held = [{name: boxes[name][rank] for name in shapes} for rank in range(ranks)]
    tensors = {
        name: torch.arange(float(torch.Size(shape).numel())).view(shape) + 1 for name, shape in shapes.items()
    }
    whole = [{name: Box.whole(shape) for name, shape in shapes.items()} for _ in range(ranks)]
    parameters = {name: Parameter(shape, FP32) for name, shape in shapes.items()}
    plan = make_plan(held, whole, parameters, bucket)
    moved = deliver(plan, held, whole, tensors)
    for target in range(ranks):
        lacking = sum(4 * (whole[target][name].numel - held[target][name].numel) for name in shapes)
        assert sum(sent[target] for sent in moved) == lacking
    for name, owners in plan.owners.items():
        assert sum(held[rank][name].numel for rank in owners) == whole[0][name].numel, (
            "each element has one rank that answers for it"
        )
    row = 4 * 10
    assert all(max(each.load) <= max(bucket, row * ranks) for each in plan.rounds)
    assert plan == make_plan(held, whole, parameters, bucket)


def test_slices_that_are_held_stay_where_they_are() -> None:
    """Two ranks train by tensor parallelism and generate so too: nothing moves. Trained by FSDP, each lacks
    half of its slice.
    """
    column = [Box.whole((8, 6)).cut(1, rank, 2) for rank in range(2)]
    row = [Box.whole((8, 6)).cut(0, rank, 2) for rank in range(2)]
    parameters = {"w": Parameter((8, 6), FP32)}

    def travels(held: list[Box], wanted: list[Box]) -> int:
        plan = make_plan([{"w": box} for box in held], [{"w": box} for box in wanted], parameters, 1 << 20)
        return sum(
            box.numel
            for each in plan.rounds
            for piece in each.pieces
            for source, target, box in piece.routes
            if source != target
        )

    assert travels(column, column) == 0
    assert travels(row, column) == 24
    assert travels(row, [Box.whole((8, 6))] * 2) == 48


def test_copies_share_the_sending() -> None:
    """HSDP, 2 copies on 8 ranks: the shards come from the own copy, so all ranks send as much."""
    held = [{"w": box} for box in grid((16, 2), (2, 4), [Replicate(), Shard(0)])]
    plan = make_plan(held, [{"w": Box.whole((16, 2))}] * 8, {"w": Parameter((16, 2), FP32)}, 1 << 20)
    routes = [
        route
        for each in plan.rounds
        for piece in each.pieces
        for route in piece.routes
        if route.source != route.target
    ]
    assert all(route.source // 4 == route.target // 4 for route in routes)
    assert [sum(route.source == rank for route in routes) for rank in range(8)] == [3] * 8


def test_rounds_are_bounded_where_one_rank_holds_all() -> None:
    held: list[dict[str, Box]] = [{"w": Box.whole((64, 8)), "v": Box.whole((3,))}, {}, {}]
    wanted = [{}, {"w": Box.whole((64, 8)), "v": Box.whole((3,))}, {"w": Box.whole((64, 8))}]
    plan = make_plan(held, wanted, {"w": Parameter((64, 8), FP32), "v": Parameter((3,), FP32)}, 256)
    assert len(plan.rounds) > 4 and max(max(each.load) for each in plan.rounds) <= 256
    deliver(plan, held, wanted, {"w": torch.randn(64, 8), "v": torch.randn(3)})


def test_what_nobody_holds_is_noticed() -> None:
    half = Box.whole((4, 2)).cut(0, 0, 2)
    with pytest.raises(AssertionError, match="4 of its 8 elements"):
        make_plan([{"w": half}], [{"w": Box.whole((4, 2))}], {"w": Parameter((4, 2), FP32)}, 100)


def test_a_large_plan_is_made_quickly_and_sorted_by_dtype() -> None:
    ranks, names = 16, [f"layer{index}" for index in range(300)]
    kinds = random.Random(0).choices([FP32, torch.bfloat16], k=len(names))
    shape = (160, 30)
    boxes = grid(shape, (ranks,), [Shard(0)])
    held = [dict.fromkeys(names, boxes[rank]) for rank in range(ranks)]
    wanted = [{name: Box.whole(shape) for name in names} for _ in range(ranks)]
    parameters = {name: Parameter(shape, kind) for name, kind in zip(names, kinds)}
    plan = make_plan(held, wanted, parameters, 1 << 20)
    dtypes = [each.dtype for each in plan.rounds]
    assert dtypes == sorted(dtypes, key=str) and sum(len(each.pieces) for each in plan.rounds) == len(names)
    assert len({id(piece.routes) for each in plan.rounds for piece in each.pieces}) <= 2, (
        "equal parameters share their routes"
    )
