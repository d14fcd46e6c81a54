"""Divergence PPO by KL (DPPO, 2602.04879): a trust region on the KL of a token against all others."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import token_terms
from hybridflow.algorithms.policy_losses.trust_region import trusted


def dppo_kl(
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
    """−A·sg[min(ρ, c)]·logπ; 0 where D > ε_high for A > 0 and π > π_old, where D > ε_low for A ≤ 0 and π <
    π_old.

    D = π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)), the KL of the two-way distributions, nats.
    ε_low, ε_high: `clip_low`, `clip_high`, nats. A log-prob above 0, which rounding makes, counts as 0. All
    else as in `dppo_tv`. Left out: as there, the top-k form.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    now = tokens.log_prob.detach().clamp(max=0.0)
    old = tokens.old_log_prob.clamp(max=0.0)
    divergence = _two_way_kl(old, now)
    outside = torch.where(
        tokens.advantages > 0, (divergence > clip_high) & (now > old), (divergence > clip_low) & (now < old)
    )
    return trusted(tokens, outside, scale, rollout_is_weights, clip_c, loss_agg_mode, loss_scale_factor)


def _two_way_kl(old: Tensor, now: Tensor) -> Tensor:
    """D of log-probs; infinite where the new policy is certain and the old was not."""
    others_old = -old.expm1()
    others_now = -now.expm1()
    # 0·log 0 is 0
    rest = torch.where(others_old > 0, others_old * (others_old.log() - others_now.log()), 0.0)
    return old.exp() * (old - now) + rest
