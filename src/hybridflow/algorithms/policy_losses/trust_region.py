"""The policy gradient of both forms of DPPO (2602.04879), which is 0 outside a trust region."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import Tokens, finish_loss


def trusted(
    tokens: Tokens,
    outside: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None,
    clip_c: float | None,
    mode: str | None,
    scale_factor: float | None,
) -> LossOutput:
    """−A·sg[min(ρ, c)]·logπ, 0 on `outside` [B, R] bool; c: `clip_c`, None: no bound. Metrics: `dppo_tv`."""
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio if clip_c is None else ratio.clamp(max=clip_c)
    loss = torch.where(outside, 0.0, -tokens.advantages * weight * tokens.log_prob)
    fractions = {"actor/pg_clipfrac": outside, "actor/pg_clipfrac_upper": (weight != ratio) & ~outside}
    return finish_loss(tokens, loss, scale, rollout_is_weights, mode or "token-mean", scale_factor, fractions)
