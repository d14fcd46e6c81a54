"""Sums from a token to the end of its row, over sampled tokens only.

Tokens of tools and environments are no steps: sums pass them unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import zero_outside


def discounted_sum(x: Tensor, mask: Tensor, discount: float | Tensor) -> Tensor:
    """G_t = x_t + discount·G_next [B, R] float, right to left; where the mask [B, R] bool is false G passes
    unchanged and the result is 0.

    x [B, R] float; `discount` a number or [B] float, one a row.
    """
    steps = zero_outside(x, mask)
    sums = torch.zeros_like(steps)
    following = steps.new_zeros(steps.shape[0])
    for t in reversed(range(steps.shape[1])):
        following = torch.where(mask[:, t], steps[:, t] + discount * following, following)
        sums[:, t] = following
    return zero_outside(sums, mask)


def next_step(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [B, R] float at the row's next sampled token, 0 after the last one."""
    steps = zero_outside(x, mask)
    following = torch.zeros_like(steps)
    ahead = steps.new_zeros(steps.shape[0])
    for t in reversed(range(steps.shape[1])):
        following[:, t] = ahead
        ahead = torch.where(mask[:, t], steps[:, t], ahead)
    return following


def still_to_come(mask: Tensor) -> Tensor:
    """Return the number of sampled tokens of the row at or after each position, [B, R] int64.

    It is 1 from the last sampled token back to the position after the one before it.
    """
    return mask.flip(-1).cumsum(-1).flip(-1)
