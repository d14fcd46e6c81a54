"""Joining a group, the meshes in it, and what ranks agree on."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridflow.distributed import process_group
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.mesh import EngineMesh, engine_mesh
from hybridflow.errors import WorkerError
from ranks import Ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_group_of_one_is_joined_and_left() -> None:
    process_group.init(0, 1, "127.0.0.1", free_port(), torch.device("cpu"), 10.0)
    try:
        assert dist.get_world_size() == 1 and process_group.max_over([3, 1]) == [3, 1]
        mesh = engine_mesh(ParallelLayout(), "cpu")
        assert mesh is engine_mesh(ParallelLayout(), "cpu") and mesh.returns
        backend = process_group.subgroup([0])._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=10), "a group waits as long as the world"
    finally:
        process_group.destroy()
    assert not dist.is_initialized()
    process_group.destroy()


def test_others_that_do_not_come_are_an_error_that_names_the_address() -> None:
    port = free_port()
    with pytest.raises(
        WorkerError, match=rf"rank 1 of 2 could not join the others at 127.0.0.1:{port} within 1 s"
    ):
        process_group.init(1, 2, "127.0.0.1", port, torch.device("cpu"), 1.0)
    assert not dist.is_initialized()


def describe(rank: int, layout: ParallelLayout) -> tuple[object, ...]:
    mesh = engine_mesh(layout, "cpu")
    tensor = None if mesh.tensor is None else mesh.tensor.get_group()
    groups = [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (mesh.sequence_group, tensor)
    ]
    return mesh.fsdp.mesh_dim_names, tuple(mesh.fsdp.shape), *groups, layout.data_rank(rank), mesh.returns


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, [(("shard",), (2,), None, None, rank, True) for rank in (0, 1)]),
        ({"fsdp_size": 1}, [(("copy", "shard"), (2, 1), None, None, rank, True) for rank in (0, 1)]),
        ({"sequence": 2}, [(("shard",), (2,), [0, 1], None, 0, rank == 0) for rank in (0, 1)]),
        ({"tensor": 2}, [(("shard",), (1,), None, [0, 1], 0, rank == 0) for rank in (0, 1)]),
    ],
)
def test_meshes_of_two_ranks(two_ranks: Ranks, sizes: dict[str, int], expected: list[object]) -> None:
    assert two_ranks.run(describe, ParallelLayout.from_keys(world_size=2, **sizes)) == expected


def timeouts(rank: int, layout: ParallelLayout, seconds: float) -> list[float]:
    """Those of the groups of a mesh, but for the world, which was made before."""
    process_group._timeout = timedelta(seconds=seconds)
    try:
        mesh = EngineMesh(layout, "cpu")
    finally:
        process_group._timeout = None
    groups = [mesh.sequence_group]
    for each in (mesh.fsdp, mesh.tensor, mesh.experts, mesh.expert_fsdp):
        if each is not None:
            groups += each.get_all_groups()
    backends = [
        group._get_backend(torch.device("cpu"))
        for group in groups
        if group is not None and group is not dist.group.WORLD
    ]
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [({"fsdp_size": 1}, 1), ({"tensor": 2, "experts": 2}, 2), ({"pipeline": 2}, 1), ({"sequence": 2}, 0)],
)
def test_groups_of_a_mesh_wait_as_long_as_the_world(
    two_ranks: Ranks, sizes: dict[str, int], groups: int
) -> None:
    layout = ParallelLayout.from_keys(world_size=2, **sizes)
    assert two_ranks.run(timeouts, layout, 77.0) == [[77.0] * groups] * 2


def say(rank: int) -> tuple[object, ...]:
    return (
        process_group.rank_and_size(),
        process_group.max_over([rank, -rank]),
        process_group.min_over([rank, -rank]),
        process_group.gather_objects({"rank": rank}),
    )


def test_ranks_tell_each_other(two_ranks: Ranks) -> None:
    both = ([1, 0], [0, -1], [{"rank": 0}, {"rank": 1}])
    assert two_ranks.run(say) == [((0, 2), *both), ((1, 2), *both)]


def test_a_process_without_a_group_is_alone() -> None:
    mine = {"rank": 3}
    assert process_group.rank_and_size() == (0, 1)
    assert process_group.max_over((4, -1)) == process_group.min_over((4, -1)) == [4, -1]
    assert process_group.gather_objects(mine)[0] is mine, "no copy, no trip through pickle"
