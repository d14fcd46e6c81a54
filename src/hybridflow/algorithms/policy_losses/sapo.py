"""Soft adaptive policy optimisation (SAPO, 2511.20347): a smooth gate where PPO has a clip."""

from __future__ import annotations

import torch

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss


def sapo(
    inputs: LossInputs,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    loss_agg_mode: str = "seq-mean-token-mean",
) -> LossOutput:
    """−A·f(ρ), f(ρ) = (4/τ)·sigmoid(τ·(ρ − 1)), τ = τ_pos for A > 0 and τ_neg for A ≤ 0; ρ = exp(clamp(logπ −
    logπ_old, ±20)).

    τ_pos, τ_neg: `tau_pos`, `tau_neg`, above 0. The gate's slope is 1 at ρ = 1 and falls off on both sides,
    for A ≤ 0 a little faster. Metrics, as means over tokens: `actor/pg_gate` (the slope 4·p·(1 − p), p =
    sigmoid(τ·(ρ − 1)): 1 where nothing is held back, near 0 where a hard clip would have been),
    `actor/ppo_kl` (logπ_old − logπ). Left out: nothing.
    """
    tokens = inputs.tokens
    a = tokens.advantages
    tau = torch.where(a > 0, a.new_tensor(tau_pos), a.new_tensor(tau_neg))
    gate = (tau * (tokens.log_ratio.exp() - 1.0)).sigmoid()
    fractions = {"actor/pg_gate": 4.0 * gate * (1.0 - gate)}
    return finish_loss(inputs, -a * (4.0 / tau) * gate, loss_agg_mode, fractions)
