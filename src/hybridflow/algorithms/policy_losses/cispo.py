"""CISPO (MiniMax-M1, 2506.13585): REINFORCE with a clipped importance weight; each token keeps a gradient."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss


def cispo(
    inputs: LossInputs,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """−sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·A·logπ; ρ = exp(clamp(logπ − logπ_old, ±20)); sg stops the
    gradient.

    ε_low, ε_high: `clip_low`, `clip_high`; the paper leaves the low side open, which is `clip_low` 1.
    Metrics, as means over tokens: `actor/pg_clipfrac` (the weight is clipped), `actor/ppo_kl` (logπ_old −
    logπ).

    Left out: the paper's optional mask of tokens, which would bring back the clip that the loss is there to
    avoid.
    """
    tokens = inputs.tokens
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * tokens.advantages * tokens.log_prob
    fractions = {"actor/pg_clipfrac": weight != ratio}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)
