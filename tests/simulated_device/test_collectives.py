"""Collectives of two processes on the device: the right values, and what would hang or mix bytes is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_accelerator import counts
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.mesh import engine_mesh
from hybridflow.distributed.process_group import gather_objects, max_over, subgroup
from ranks import Ranks

SIM = torch.device("sim", 0)


def own(rank: int, *shape: int) -> Tensor:
    """Numbers that tell the rank and the place: rank 0 has 0, 1, …, rank 1 has 100, 101, …"""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).add(100 * rank).to(SIM)


def without_faults(found: Any) -> Any:
    """Return what a rank found; a fault that nobody has raised fails the test."""
    assert not counts.faults, counts.faults
    return found


def collectives(rank: int) -> dict[str, Any]:
    """Each collective that the product uses, as lists of numbers."""
    found: dict[str, Tensor] = {}
    found["all_reduce"] = own(rank, 3)
    dist.all_reduce(found["all_reduce"])
    found["all_reduce max"] = own(rank, 3)
    dist.all_reduce(found["all_reduce max"], dist.ReduceOp.MAX)
    found["broadcast"] = own(rank, 2)
    dist.broadcast(found["broadcast"], group_src=1)
    parts = [torch.empty(2, device=SIM) for _ in range(2)]
    dist.all_gather(parts, own(rank, 2))
    found["all_gather"] = torch.cat(parts)
    found["all_gather_into_tensor"] = torch.empty(4, device=SIM)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], own(rank, 2))
    found["reduce_scatter_tensor"] = torch.empty(2, device=SIM)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], own(rank, 4))
    splits = ([1, 2], [2, 1])[rank]  # so much comes from each rank, and goes to each
    found["all_to_all_single"] = torch.empty(3, device=SIM)
    dist.all_to_all_single(found["all_to_all_single"], own(rank, 3), splits, splits)
    found["messages"] = torch.empty(2, device=SIM)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own(rank, 2), 1 - rank),
            dist.P2POp(dist.irecv, found["messages"], 1 - rank),
        ]
    )
    for work in works:
        work.wait()
    dist.barrier()
    return without_faults({name: tensor.tolist() for name, tensor in found.items()})


def test_each_collective_has_the_right_values(ranks: Ranks) -> None:
    everywhere = {
        "all_reduce": [100, 102, 104],
        "all_reduce max": [100, 101, 102],
        "broadcast": [100, 101],
        "all_gather": [0, 1, 100, 101],
        "all_gather_into_tensor": [0, 1, 100, 101],
    }
    own_ones = (
        {"reduce_scatter_tensor": [100, 102], "all_to_all_single": [0, 100, 101], "messages": [100, 101]},
        {"reduce_scatter_tensor": [104, 106], "all_to_all_single": [1, 2, 102], "messages": [0, 1]},
    )
    assert ranks.run(collectives) == [everywhere | each for each in own_ones]


def on_the_host(rank: int) -> Any:
    """The same group takes small numbers of the host, for which the device does not wait."""
    before = counts.total.num_waits
    found = max_over([rank, 3 - rank]), gather_objects(f"rank {rank}")
    assert counts.total.num_waits == before
    return without_faults(found)


def test_numbers_of_the_host_travel_by_the_same_group(ranks: Ranks) -> None:
    assert ranks.run(on_the_host) == [([1, 3], ["rank 0", "rank 1"])] * 2


def in_subgroups(rank: int) -> Any:
    """Groups of some ranks, and functional collectives and tensors of a mesh."""
    alone = [subgroup([each]) for each in range(2)][rank]
    both = subgroup([0, 1])
    single = own(rank, 2)
    dist.all_reduce(single, group=alone)
    sums = own(rank, 2)
    dist.all_reduce(sums, group=both)
    mesh = engine_mesh(ParallelLayout.from_keys(2, tensor=2), "sim").tensor
    assert mesh is not None
    gathered = functional.all_gather_tensor(own(rank, 2), 0, mesh.get_group())
    whole = torch.arange(8.0).reshape(4, 2).to(SIM)
    left = distribute_tensor(whole, mesh, [Shard(1)])
    right = distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    product = left @ right
    assert isinstance(product, DTensor) and product.placements[0].is_partial()
    assert left.full_tensor().tolist() == whole.tolist()
    spread = product.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()])
    wanted = whole @ whole.t()
    assert product.full_tensor().tolist() == spread.to_local().tolist() == wanted.tolist()
    return without_faults([single.tolist(), sums.tolist(), gathered.tolist()])


def test_groups_of_some_ranks_and_tensors_of_a_mesh(ranks: Ranks) -> None:
    shared = [[100, 102], [0, 1, 100, 101]]
    assert ranks.run(in_subgroups) == [[[0, 1], *shared], [[100, 101], *shared]]


def not_waited_for(rank: int) -> Any:
    """A kernel reads what a collective fills, before and after its work was waited for."""
    tensor = own(rank, 3)
    work = dist.all_reduce(tensor, async_op=True)
    try:
        tensor + 1
        said = "nothing"
    except counts.DeviceFault as fault:
        said = str(fault)
    counts.faults.clear()
    work.wait()
    before = counts.total.num_waits
    doubled = tensor * 2
    assert counts.total.num_waits == before, "the host does not wait"
    return said, without_faults(doubled.tolist())


def test_results_are_not_used_before_the_work_was_waited_for(ranks: Ranks) -> None:
    for said, doubled in ranks.run(not_waited_for):
        assert "reads memory on a stream that has not waited for another stream's allreduce_" in said
        assert doubled == [200, 204, 208]


def another_order(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(own(rank, 3))
    else:
        dist.broadcast(own(rank, 3), group_src=0)


def another_shape(rank: int) -> None:
    dist.all_reduce(own(rank, 3 + rank))


def another_dtype(rank: int) -> None:
    dist.all_reduce(own(rank, 3).to(torch.float32 if rank == 0 else torch.bfloat16))


def one_on_the_host(rank: int) -> None:
    tensor = own(rank, 3)
    dist.all_reduce(tensor if rank == 0 else tensor.cpu())


def mixed(rank: int) -> None:
    dist.all_gather([torch.empty(2), torch.empty(2)], own(rank, 2))


def not_contiguous(rank: int) -> None:
    dist.all_reduce(own(rank, 4, 2).t())


FAULTS: dict[str, tuple[Callable[[int], None], str]] = {
    "another order": (
        another_order,
        r"rank 0 makes allreduce \(\(3,\)\) of torch.float32 on the device, rank 1 makes broadcast",
    ),
    "another shape": (
        another_shape,
        r"rank 0 makes allreduce \(\(3,\)\).*, rank 1 makes allreduce \(\(4,\)\)",
    ),
    "another dtype": (another_dtype, r"of torch.float32 on the device, rank 1 .* of torch.bfloat16"),
    "one on the host": (one_on_the_host, r"on the device, rank 1 makes allreduce .* on the host"),
    "mixed": (mixed, r"allgather_ of a tensor on cpu beside tensors of the device"),
    "not contiguous": (not_contiguous, r"allreduce_ of a tensor that is not contiguous, \(2, 4\)"),
}


def told(rank: int, name: str) -> str:
    """Return what a planted fault is told as on this rank."""
    with pytest.raises(counts.DeviceFault) as error:
        FAULTS[name][0](rank)
    counts.faults.clear()
    return str(error.value)


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_hang_is_told_on_each_rank(name: str, ranks: Ranks) -> None:
    message = FAULTS[name][1]
    first, second = ranks.run(told, name, deadline=60.0)
    assert re.search(message, first), first
    assert second != first or "call" not in first
    assert ranks.run(on_the_host)[0] == ([1, 3], ["rank 0", "rank 1"]), "they go on together"
