"""Divergence PPO by total variation (DPPO, 2602.04879): a trust region on the change of a probability."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import token_terms
from hybridflow.algorithms.policy_losses.trust_region import trusted


def dppo_tv(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 20.0,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−A·sg[min(ρ, c)]·logπ; 0 where A > 0 and π − π_old > ε_high, and where A ≤ 0 and π − π_old < −ε_low.

    Shapes and `rollout_is_weights` as in `vanilla`; ρ = exp(clamp(logπ − logπ_old, ±20)); sg stops the
    gradient. ε_low, ε_high: `clip_low`, `clip_high`, differences of probabilities; c: `clip_c`, the largest
    importance weight, None: no bound. Total variation of the two-way distributions is |π − π_old|.
    `loss_agg_mode` None: token-mean, in which masked tokens count too. Metrics, as means over tokens:
    `actor/pg_clipfrac` (outside the trust region), `actor/pg_clipfrac_upper` (c bounds the weight),
    `actor/ppo_kl` (logπ_old − logπ). Left out: the top-k form of the divergence, which needs logits.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    moved = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    outside = torch.where(tokens.advantages > 0, moved > clip_high, moved < -clip_low)
    return trusted(tokens, outside, scale, rollout_is_weights, clip_c, loss_agg_mode, loss_scale_factor)
