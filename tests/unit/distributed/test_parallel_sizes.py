"""Sizes of the parallel axes: what they mean, and which do not go together."""

from __future__ import annotations

import pytest

from hybridflow.distributed.mesh import ParallelSizes
from hybridflow.errors import ConfigError


def test_full_shard_is_the_default() -> None:
    sizes = ParallelSizes(world_size=8)
    assert (sizes.data, sizes.shards, sizes.copies) == (8, 8, 1) and sizes.axes() == (("dp", 8),)
    assert ParallelSizes().axes() == (("dp", 1),)


def test_copies_of_the_parameters_do_not_change_the_rows() -> None:
    sizes = ParallelSizes(world_size=8, fsdp_size=2)
    assert (sizes.data, sizes.shards, sizes.copies) == (8, 2, 4) and sizes.axes() == (("dp", 8),)


def test_ranks_that_share_rows() -> None:
    sequence = ParallelSizes(world_size=8, fsdp_size=4, sequence=2)
    assert sequence.axes() == (("dp", 4), ("sp", 2)) and (sequence.shards, sequence.copies) == (4, 2)
    assert [sequence.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sequence.is_leader(rank) for rank in range(4)] == [True, False, True, False]
    tensor = ParallelSizes(world_size=8, tensor=4)
    assert tensor.axes() == (("dp", 2), ("tp", 4)) and (tensor.shards, tensor.copies, tensor.data) == (
        2,
        1,
        2,
    )
    assert ParallelSizes(world_size=8, tensor=4, fsdp_size=1).copies == 2
    assert str(tensor) == "8 ranks (shards 2, tensor 4)"


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"world_size": 4, "sequence": 3}, r"ulysses_sequence_parallel_size=3 does not divide the 4 ranks"),
        ({"world_size": 1, "tensor": 2}, r"tensor_parallel_size=2 does not divide the 1 ranks"),
        (
            {"world_size": 4, "fsdp_size": 3},
            r"fsdp_size=3 does not divide 4 ranks: set it to a divisor, or to -1",
        ),
        (
            {"world_size": 4, "fsdp_size": 4, "tensor": 2},
            r"fsdp_size=4 does not divide 2 ranks \(4 ranks / tensor_parallel_size 2\)",
        ),
        ({"world_size": 4, "fsdp_size": 0}, r"fsdp_size=0"),
        ({"world_size": 4, "sequence": 2, "tensor": 2}, r"cannot be combined"),
    ],
)
def test_sizes_that_do_not_go_together(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ParallelSizes(**sizes)
