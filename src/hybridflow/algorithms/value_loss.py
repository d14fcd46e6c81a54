"""The critic's loss: how far its values are from the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale, aggregate, masked_sum, zero_outside


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    scale: LossScale,
    *,
    clip_range: float | None,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """½·agg(max((v − R)², (clip(v, V ± clip_range) − R)²)).

    This is PPO's value loss (1707.06347 as OpenAI's code has it). values v, old_values V, returns R: [B, R]
    float, in units of the score; mask [B, R] bool is the loss mask. `clip_range` None: no clipping. Metrics
    `critic/vf_clipfrac` (share of tokens where the clipped term is the larger) and `critic/vpred_mean`.

    Left out: nothing; VAPO's training of the values before the policy is `trainer.critic_warmup`.
    """
    v = zero_outside(values, mask)
    anchor = zero_outside(old_values, mask).detach()
    target = zero_outside(returns, mask).detach()
    error = (v - target).square()
    clipped = error
    if clip_range is not None:
        clipped = (
            torch.minimum(torch.maximum(v, anchor - clip_range), anchor + clip_range) - target
        ).square()
    above = clipped > error
    loss = 0.5 * aggregate(
        torch.where(above, clipped, error), mask, loss_agg_mode or "token-mean", scale, loss_scale_factor
    )
    count = mask.bool().sum()
    return LossOutput(
        loss,
        {
            "critic/vf_clipfrac": (masked_sum(above, mask), count),
            "critic/vpred_mean": (masked_sum(values, mask).detach(), count),
        },
    )
