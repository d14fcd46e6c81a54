"""PPO's clipped policy loss (1707.06347) with clip-higher (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

import torch

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, clipped, finish_loss


def vanilla(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)), for A < 0 at most −A·c; ρ = exp(clamp(logπ − logπ_old,
    ±20)).

    ε_low, ε_high: `clip_low`, `clip_high`; c: `clip_c`, None: no dual clip. Metrics, as means over tokens:
    `actor/pg_clipfrac` (the clip decides), `actor/pg_clipfrac_lower` (the dual clip decides), `actor/ppo_kl`
    (logπ_old − logπ).

    Left out: PPO's form with an adaptive KL penalty; `use_kl_loss` and KL in the reward are terms of their
    own.
    """
    tokens = inputs.tokens
    a = tokens.advantages
    loss, clip_decides = clipped(a, tokens.log_ratio.exp(), clip_low, clip_high)
    bound_decides = torch.zeros_like(clip_decides)
    if clip_c is not None:
        bound_decides = (a < 0) & (loss > -a * clip_c)
        loss = torch.where(bound_decides, -a * clip_c, loss)
    fractions = {"actor/pg_clipfrac": clip_decides, "actor/pg_clipfrac_lower": bound_decides}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)
