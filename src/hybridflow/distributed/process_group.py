"""The torch.distributed world of a resource pool's processes, and small collectives over it.

CPU tensors travel by gloo, those of an accelerator by its own backend (NCCL on CUDA). Small numbers that all
ranks must agree on (counts, flags) are CPU tensors on purpose: they never make a GPU wait.

Ranks may generate together (`ReplicaRanks`): each has a slice of every dense layer, and all take the same
steps.

Everything that decides a step must be equal on all of them. Logits are, since partial products are summed
over the ranks; random numbers are, by their keys; what depends on a rank's memory is agreed on here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.accelerators import features, is_accelerator
from hybridflow.distributed.device import set_current
from hybridflow.errors import ConfigError, RolloutError, WorkerError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_timeout: timedelta | None = None  # of the world; torch gives other groups its own default
_WORD = 1 << 62


def init(rank: int, world_size: int, address: str, port: int, device: torch.device, timeout_s: float) -> None:
    """Join the group of `world_size` processes whose rank 0 listens at `address`:`port`.

    Every collective waits at most `timeout_s` seconds. Raises WorkerError where the others cannot be reached;
    a process may join only once.
    """
    assert not dist.is_initialized(), "this process is in a group already"
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    backend = "gloo"
    if is_accelerator(device.type):
        set_current(device)
        backend = f"cpu:gloo,{device.type}:{features(device.type).backend}"
    global _timeout
    _timeout = timedelta(seconds=timeout_s)
    host = address
    if ":" in address:  # IPv6
        host = f"[{address}]"
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=_timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise WorkerError(
            f"rank {rank} of {world_size} could not join the others at {address}:{port} within "
            f"{timeout_s:.0f} s: {' '.join(str(error).split())[:300]}. Is the port free and open between "
            "the nodes?",
            rank=rank,
        ) from error
    logger.debug("rank %d of %d has joined at %s:%d (%s)", rank, world_size, address, port, backend)


def timeout_s() -> float:
    """Return how long the collectives of the world wait, seconds."""
    assert _timeout is not None, "this process is in no group"
    return _timeout.total_seconds()


def subgroup(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a new group of some ranks, whose collectives wait as long as those of the world.

    All ranks of the world call it together, in the same order.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=_timeout)
    return group


def destroy() -> None:
    """Leave the group, if this process has joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank in `group` (None: the world) and its size; (0, 1) without a world."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks of `group` (None: of the world, if there is one), in rank order.

    All of them call it together.
    """
    _, size = rank_and_size(group)
    if size == 1:
        return [mine]
    every: list[T | None] = [None] * size
    dist.all_gather_object(every, mine, group=group)
    return cast(list[T], every)


def max_over(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the largest of each number over the ranks of `group` (None: of the world, if there is one).

    All of them call it together.
    """
    return _reduced(values, dist.ReduceOp.MAX, group)


def min_over(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the least of each number over the ranks; otherwise like `max_over`."""
    return _reduced(values, dist.ReduceOp.MIN, group)


def _reduced(
    values: Sequence[int], how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> list[int]:
    if rank_and_size(group)[1] == 1:
        return list(values)
    numbers = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(numbers, op=how, group=group)
    return [int(number) for number in numbers]


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks of one replica, as one of them sees it; a rank alone is the default."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_this_rank(cls, size: int) -> ReplicaRanks:
        """Return the replica of `size` consecutive ranks that this rank belongs to.

        All ranks of the world call it together. Raises ConfigError where the world cannot be divided into
        such replicas.
        """
        if size == 1:
            return cls()
        rank, ranks = rank_and_size()
        if ranks % size:
            raise ConfigError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the {ranks} "
                "rank(s) of the pool that generates: set it to a divisor of them"
            )
        groups = [subgroup(range(first, first + size)) for first in range(0, ranks, size)]
        return cls(size, rank % size, groups[rank // size])

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by its sum over the ranks, the same to the bit on all of them."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def from_first(self, value: T | None) -> T:
        """Return the value of the first rank, whatever the others give; all ranks call this together."""
        if self.size > 1:
            values = [value]
            dist.broadcast_object_list(values, group=self.group, group_src=0, device=torch.device("cpu"))
            value = values[0]
        assert value is not None, "the first rank has a value"
        return value

    def smallest(self, number: int) -> int:
        """Return the least of a number over the ranks, which all call this together."""
        if self.size == 1:
            return number
        return min_over([number], self.group)[0]

    def check_same(self, tokens: int) -> None:
        """Raise RolloutError on all ranks if they sampled different tokens, of which `tokens` is made."""
        if self.size == 1:
            return
        word = tokens % _WORD
        least, largest = min_over([word, -word], self.group)
        if least != -largest:
            raise RolloutError(
                f"the {self.size} ranks of a replica sampled different tokens from the same requests, so "
                "their logits differ. Are their machines and their software equal? Else set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
            )
