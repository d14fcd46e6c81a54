"""GMPO (2507.20673): the geometric mean of a response's ratios, which no single token can drag far."""

from __future__ import annotations

import torch

from hybridflow.algorithms.aggregation import LossOutput, masked_mean
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss


def geo_mean(
    inputs: LossInputs,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    loss_agg_mode: str = "seq-mean-token-mean",
) -> LossOutput:
    """−Ā·exp(mean_t d_t) for a row, on each of its tokens; d_t = min(logρ_t, ε_high) for Ā > 0, max(logρ_t,
    −ε_low) for Ā ≤ 0.

    Ā is the row's mean advantage; logρ = clamp(logπ − logπ_old, ±20). ε_low, ε_high: `clip_low`, `clip_high`,
    in log space. A row is clamped on the side its advantage pushes to and free on the other.
    `seq-mean-token-mean` is the mean of the row losses. Metrics, as means over tokens: `actor/pg_clipfrac`
    (the clamp decides), `actor/ppo_kl` (logπ_old − logπ).

    Beside the paper: where the tokens of a row have several advantages, Ā stands for them. Left out: nothing.
    """
    tokens = inputs.tokens
    row = masked_mean(tokens.advantages, tokens.mask, dim=-1).unsqueeze(-1)
    bounded = torch.where(
        row > 0, tokens.log_ratio.clamp(max=clip_high), tokens.log_ratio.clamp(min=-clip_low)
    )
    ratio = masked_mean(bounded, tokens.mask, dim=-1).exp().unsqueeze(-1)
    loss = (-row * ratio).expand(tokens.mask.shape)
    fractions = {"actor/pg_clipfrac": bounded != tokens.log_ratio}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)
