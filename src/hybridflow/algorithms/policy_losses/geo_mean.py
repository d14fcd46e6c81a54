"""GMPO (2507.20673): the geometric mean of a response's ratios, which no single token can drag far."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.masked import masked_mean
from hybridflow.algorithms.policy_losses.ratios import finish_loss, token_terms


def geo_mean(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−Ā·exp(mean_t d_t) for a row, on each of its tokens; d_t = min(logρ_t, ε_high) for Ā > 0, max(logρ_t,
    −ε_low) for Ā ≤ 0.

    Shapes and `rollout_is_weights` as in `vanilla`; Ā is the row's mean advantage; logρ = clamp(logπ −
    logπ_old, ±20). ε_low, ε_high: `clip_low`, `clip_high`, in log space. A row is clamped on the side its
    advantage pushes to and free on the other. `loss_agg_mode` None: seq-mean-token-mean, which is the mean of
    the row losses. Metrics, as means over tokens: `actor/pg_clipfrac` (the clamp decides), `actor/ppo_kl`
    (logπ_old − logπ).

    Beside the paper: where the tokens of a row have several advantages, Ā stands for them. Left out: nothing.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    row = masked_mean(tokens.advantages, tokens.mask, dim=-1).unsqueeze(-1)
    bounded = torch.where(
        row > 0, tokens.log_ratio.clamp(max=clip_high), tokens.log_ratio.clamp(min=-clip_low)
    )
    ratio = masked_mean(bounded, tokens.mask, dim=-1).exp().unsqueeze(-1)
    loss = (-row * ratio).expand(tokens.mask.shape)
    mode = loss_agg_mode or "seq-mean-token-mean"
    fractions = {"actor/pg_clipfrac": bounded != tokens.log_ratio}
    return finish_loss(tokens, loss, scale, rollout_is_weights, mode, loss_scale_factor, fractions)
