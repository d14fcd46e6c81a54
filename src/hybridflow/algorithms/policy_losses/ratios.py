"""Steps that all policy losses share: the log-ratio first; weights, aggregation and metrics last.

log_prob, old_log_prob, advantages, mask ──token_terms──► Tokens ──(a loss)──► loss per token
                                                                └──finish_loss──► LossOutput
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale, Ratio, aggregate
from hybridflow.algorithms.masked import masked_sum, zero_outside


class Tokens(NamedTuple):
    """Inputs of a policy loss, each [B, R] in float32 or better and 0 outside the mask."""

    mask: Tensor
    """[B, R] bool."""
    log_prob: Tensor
    """logπ, nats, with gradient."""
    old_log_prob: Tensor
    """logπ_old, nats, detached."""
    advantages: Tensor
    """A, detached."""
    log_ratio: Tensor
    """logρ = clamp(logπ − logπ_old, ±20), with gradient inside the bounds."""


def token_terms(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tokens:
    """Return the tokens of a loss with their log-ratio; only `log_prob` carries a gradient."""
    a = zero_outside(advantages, response_mask).detach()
    old = zero_outside(old_log_prob, response_mask).detach()
    now = zero_outside(log_prob, response_mask)
    return Tokens(response_mask.bool(), now, old, a, (now - old).clamp(-20.0, 20.0))


def clipped(advantages: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)) [B, R], and where the clip decides [B, R] bool."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    decides = bounded > plain
    return torch.where(decides, bounded, plain), decides


def per_token(row_loss: Tensor, mask: Tensor) -> Tensor:
    """Return a loss per row [B] in equal parts on the row's tokens [B, R]; their sum is the row's loss."""
    kept = mask.bool()
    return zero_outside((row_loss / kept.sum(-1).clamp(min=1)).unsqueeze(-1).expand(kept.shape), kept)


def finish_loss(
    tokens: Tokens,
    loss: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None,
    mode: str,
    scale_factor: float | None,
    fractions: Mapping[str, Tensor] | None = None,
    ratios: Mapping[str, Ratio] | None = None,
) -> LossOutput:
    """Return this micro-batch's share of the loss: loss [B, R] times the weights [B, R], aggregated.

    `fractions` are further metrics [B, R], reported as means over tokens; `ratios` are metrics that count
    something else. `actor/ppo_kl`, the mean of −logρ over tokens, is always reported.
    """
    if rollout_is_weights is not None:
        loss = loss * zero_outside(rollout_is_weights, tokens.mask).detach()
    count = tokens.mask.sum()
    metrics = {
        name: (masked_sum(values, tokens.mask).detach(), count) for name, values in (fractions or {}).items()
    }
    metrics["actor/ppo_kl"] = (masked_sum(-tokens.log_ratio, tokens.mask).detach(), count)
    return LossOutput(aggregate(loss, tokens.mask, mode, scale, scale_factor), metrics | dict(ratios or {}))
