"""Ranks that generate together: each has a slice of every dense layer, and all take the same steps.

Everything that decides a step must be equal on all of them. Logits are, since partial products are summed
over the ranks; random numbers are, by their keys; what depends on a rank's memory is agreed on here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.process_group import min_over, rank_and_size, subgroup
from hybridflow.errors import ConfigError, RolloutError

T = TypeVar("T")

_WORD = 1 << 62


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
