"""Divergence PPO (DPPO, 2602.04879): the policy gradient inside a trust region, on the change of a token's
probability (total variation), or on the KL of a token against all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, Tokens, finish_loss


def dppo_tv(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 20.0,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """−A·sg[min(ρ, c)]·logπ; 0 where A > 0 and π − π_old > ε_high, and where A ≤ 0 and π − π_old < −ε_low.

    ρ = exp(clamp(logπ − logπ_old, ±20)); sg stops the gradient. ε_low, ε_high: `clip_low`, `clip_high`,
    differences of probabilities; c: `clip_c`, the largest importance weight, None: no bound. Total variation
    of the two-way distributions is |π − π_old|. Masked tokens count in the mean too. Metrics, as means over
    tokens: `actor/pg_clipfrac` (outside the trust region), `actor/pg_clipfrac_upper` (c bounds the weight),
    `actor/ppo_kl` (logπ_old − logπ). Left out: the top-k form of the divergence, which needs logits.
    """
    tokens = inputs.tokens
    moved = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    outside = torch.where(tokens.advantages > 0, moved > clip_high, moved < -clip_low)
    return _trusted(inputs, tokens, outside, clip_c, loss_agg_mode)


def dppo_kl(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 20.0,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """−A·sg[min(ρ, c)]·logπ; 0 where D > ε_high for A > 0 and π > π_old, where D > ε_low for A ≤ 0 and π <
    π_old.

    D = π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)), the KL of the two-way distributions, nats.
    ε_low, ε_high: `clip_low`, `clip_high`, nats. A log-prob above 0, which rounding makes, counts as 0. All
    else as in `dppo_tv`. Left out: as there, the top-k form.
    """
    tokens = inputs.tokens
    now = tokens.log_prob.detach().clamp(max=0.0)
    old = tokens.old_log_prob.clamp(max=0.0)
    divergence = _two_way_kl(old, now)
    outside = torch.where(
        tokens.advantages > 0, (divergence > clip_high) & (now > old), (divergence > clip_low) & (now < old)
    )
    return _trusted(inputs, tokens, outside, clip_c, loss_agg_mode)


def _two_way_kl(old: Tensor, now: Tensor) -> Tensor:
    """D of log-probs; infinite where the new policy is certain and the old was not."""
    others_old = -old.expm1()
    others_now = -now.expm1()
    # 0·log 0 is 0
    rest = torch.where(others_old > 0, others_old * (others_old.log() - others_now.log()), 0.0)
    return old.exp() * (old - now) + rest


def _trusted(
    inputs: LossInputs, tokens: Tokens, outside: Tensor, clip_c: float | None, loss_agg_mode: str
) -> LossOutput:
    """−A·sg[min(ρ, c)]·logπ, 0 on `outside` [B, R] bool; c: `clip_c`, None: no bound. Metrics: `dppo_tv`."""
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio if clip_c is None else ratio.clamp(max=clip_c)
    loss = torch.where(outside, 0.0, -tokens.advantages * weight * tokens.log_prob)
    fractions = {"actor/pg_clipfrac": outside, "actor/pg_clipfrac_upper": (weight != ratio) & ~outside}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)
