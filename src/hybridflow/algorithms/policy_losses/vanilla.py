"""PPO's clipped policy loss (1707.06347) with clip-higher (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale, aggregate
from hybridflow.algorithms.masked import masked_sum, zero_outside


def vanilla(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """max(−A·ρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high)), for A < 0 at most −A·clip_c; ρ = exp(clamp(logπ − logπ_old, ±20)).

    log_prob, old_log_prob [B, R] float, nats; advantages [B, R] float; response_mask [B, R] bool: the tokens to learn from (the batch's
    `loss_mask`); rollout_is_weights [B, R] float multiply the token loss. `clip_c` None: no dual clip. `loss_agg_mode` None: token-mean.
    Metrics, as means over tokens: `actor/pg_clipfrac` (the clip decides), `actor/pg_clipfrac_lower` (the dual clip decides),
    `actor/ppo_kl` (logπ_old − logπ).
    """
    a = zero_outside(advantages, response_mask).detach()
    old = zero_outside(old_log_prob, response_mask).detach()
    log_ratio = (zero_outside(log_prob, response_mask) - old).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain, clipped = -a * ratio, -a * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clip_decides = clipped > plain
    loss = torch.where(clip_decides, clipped, plain)
    bound_decides = torch.zeros_like(clip_decides)
    if clip_c is not None:
        bound_decides = (a < 0) & (loss > -a * clip_c)
        loss = torch.where(bound_decides, -a * clip_c, loss)
    if rollout_is_weights is not None:
        loss = loss * zero_outside(rollout_is_weights, response_mask).detach()
    count = response_mask.bool().sum()
    return LossOutput(
        aggregate(loss, response_mask, loss_agg_mode or "token-mean", scale, loss_scale_factor),
        {
            "actor/pg_clipfrac": (masked_sum(clip_decides, response_mask), count),
            "actor/pg_clipfrac_lower": (masked_sum(bound_decides, response_mask), count),
            "actor/ppo_kl": (masked_sum(-log_ratio, response_mask).detach(), count),
        },
    )
