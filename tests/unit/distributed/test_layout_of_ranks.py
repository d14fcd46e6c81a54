"""The layout of a model over ranks: its numbers, what does not go together, and who has which rows."""

from __future__ import annotations

from itertools import product

import pytest

from hybridflow.controller import MeshInfo
from hybridflow.distributed.layout import ParallelLayout


def test_full_shard_is_the_default() -> None:
    layout = ParallelLayout.from_keys(world_size=8)
    assert layout == ParallelLayout(dp_shard=8) and layout.axes() == (("dp", 8),)
    assert ParallelLayout().axes() == (("dp", 1),)


def test_copies_of_the_parameters_do_not_change_the_rows() -> None:
    layout = ParallelLayout.from_keys(world_size=8, fsdp_size=2)
    assert layout == ParallelLayout(dp_replicate=4, dp_shard=2)
    assert layout.data == 8 and layout.axes() == (("dp", 8),)


def test_ranks_that_share_rows() -> None:
    sequence = ParallelLayout.from_keys(world_size=8, fsdp_size=4, sequence=2)
    assert sequence == ParallelLayout(dp_replicate=2, dp_shard=4, cp=2)
    assert sequence.axes() == (("dp", 4), ("sp", 2))
    assert [sequence.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sequence.returns(rank) for rank in range(4)] == [True, False, True, False]
    tensor = ParallelLayout.from_keys(world_size=8, tensor=4)
    assert tensor == ParallelLayout(dp_shard=2, tp=4)
    assert tensor.axes() == (("dp", 2), ("tp", 4)) and tensor.data == 2
    assert ParallelLayout.from_keys(world_size=8, tensor=4, fsdp_size=1).dp_replicate == 2
    assert str(tensor) == "8 ranks (shards 2, tensor 4)"


def test_the_last_stage_answers() -> None:
    """Two stages of two tensor-parallel ranks each, twice."""
    layout = ParallelLayout(dp_shard=2, tp=2, pp=2)
    assert layout.axes() == (("pp", 2), ("dp", 2), ("tp", 2)) and layout.world_size == 8
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [rank for rank in range(8) if layout.returns(rank)] == [4, 6]
    assert str(layout) == "8 ranks (stages 2, shards 2, tensor 2)"


def test_the_driver_deals_rows_as_the_layout_says() -> None:
    """In every layout one rank returns the answers of each part of the rows, and the controller agrees."""
    seen = 0
    for replicate, shard, cp, tp, pp, ep in product((1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 2), (1, 3), (1, 2)):
        if (replicate * shard) % cp or shard * tp % ep:
            continue
        layout = ParallelLayout(replicate, shard, cp, tp, pp, ep)
        mesh = MeshInfo(layout.world_size, layout.axes())
        ranks = range(layout.world_size)
        assert mesh.num_parts == layout.data
        assert [mesh.part_of(rank) for rank in ranks] == [layout.data_rank(rank) for rank in ranks]
        assert [mesh.is_leader(rank) for rank in ranks] == [layout.returns(rank) for rank in ranks]
        answered = [layout.data_rank(rank) for rank in ranks if layout.returns(rank)]
        assert answered == list(range(layout.data))
        seen += 1
    assert seen == 142


@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 4, "sequence": 3},
        {"world_size": 1, "tensor": 2},
        {"world_size": 4, "fsdp_size": 3},
        {"world_size": 4, "fsdp_size": 4, "tensor": 2},
        {"world_size": 4, "fsdp_size": 0},
        {"world_size": 2, "sequence": 2, "tensor": 2},
    ],
)
def test_sizes_that_do_not_go_together(sizes: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match=f"{sizes['world_size']} ranks, fsdp_size="):
        ParallelLayout.from_keys(**sizes)
