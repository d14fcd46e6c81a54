"""CISPO (MiniMax-M1, 2506.13585): REINFORCE with a clipped importance weight; each token keeps a gradient."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import finish_loss, token_terms


def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·A·logπ; ρ = exp(clamp(logπ − logπ_old, ±20)); sg stops the
    gradient.

    Shapes and `rollout_is_weights` as in `vanilla`. ε_low, ε_high: `clip_low`, `clip_high`; the paper leaves
    the low side open, which is `clip_low` 1. `loss_agg_mode` None: token-mean. Metrics, as means over tokens:
    `actor/pg_clipfrac` (the weight is clipped), `actor/ppo_kl` (logπ_old − logπ).

    Left out: the paper's optional mask of tokens, which would bring back the clip that the loss is there to
    avoid.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * tokens.advantages * tokens.log_prob
    fractions = {"actor/pg_clipfrac": weight != ratio}
    return finish_loss(
        tokens, loss, scale, rollout_is_weights, loss_agg_mode or "token-mean", loss_scale_factor, fractions
    )
