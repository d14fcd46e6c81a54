"""Statistics of the scores inside each group, handed back row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Each [B]: every row has its group's."""

    size: Tensor
    """int64: rows that count."""
    mean: Tensor
    """float."""
    std: Tensor
    """float, Bessel-corrected; 0 for fewer than two rows."""
    varies: Tensor
    """bool: the largest score is not the smallest, decided on the scores themselves and not after rounding."""


def group_statistics(scores: Tensor, counts: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Mean and deviation of scores [B] float over the rows of each group where `counts` [B] bool; group_ids [B] int64, any numbers."""
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    weight = counts.to(scores.dtype)
    kept = torch.where(counts, scores, 0.0)

    def per_group(x: Tensor) -> Tensor:
        return scores.new_zeros(num_groups).index_add(0, group, x)

    size = per_group(weight)
    mean = per_group(kept) / size.clamp(min=1)
    squares = per_group(weight * (kept - mean[group]).square())
    highest = scores.new_full((num_groups,), -torch.inf).scatter_reduce(0, group, torch.where(counts, scores, -torch.inf), "amax")
    lowest = scores.new_full((num_groups,), torch.inf).scatter_reduce(0, group, torch.where(counts, scores, torch.inf), "amin")
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics(size[group].to(torch.int64), mean[group], std[group], (highest > lowest)[group])
