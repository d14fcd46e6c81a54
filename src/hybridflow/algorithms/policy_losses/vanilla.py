"""PPO's clipped policy loss (1707.06347) with clip-higher (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import clipped, finish_loss, token_terms


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
    """max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)), for A < 0 at most −A·c; ρ = exp(clamp(logπ − logπ_old,
    ±20)).

    log_prob, old_log_prob [B, R] float, nats; advantages [B, R] float; response_mask [B, R] bool: the tokens
    to learn from (the batch's `loss_mask`); rollout_is_weights [B, R] float multiply the token loss. ε_low,
    ε_high: `clip_low`, `clip_high`; c: `clip_c`, None: no dual clip. `loss_agg_mode` None: token-mean.
    Metrics, as means over tokens: `actor/pg_clipfrac` (the clip decides), `actor/pg_clipfrac_lower` (the dual
    clip decides), `actor/ppo_kl` (logπ_old − logπ).

    Left out: PPO's form with an adaptive KL penalty; `use_kl_loss` and KL in the reward are terms of their
    own.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    a = tokens.advantages
    loss, clip_decides = clipped(a, tokens.log_ratio.exp(), clip_low, clip_high)
    bound_decides = torch.zeros_like(clip_decides)
    if clip_c is not None:
        bound_decides = (a < 0) & (loss > -a * clip_c)
        loss = torch.where(bound_decides, -a * clip_c, loss)
    fractions = {"actor/pg_clipfrac": clip_decides, "actor/pg_clipfrac_lower": bound_decides}
    return finish_loss(
        tokens, loss, scale, rollout_is_weights, loss_agg_mode or "token-mean", loss_scale_factor, fractions
    )
