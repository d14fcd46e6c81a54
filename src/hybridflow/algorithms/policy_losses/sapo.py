"""Soft adaptive policy optimisation (SAPO, 2511.20347): a smooth gate where PPO has a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import finish_loss, token_terms


def sapo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−A·f(ρ), f(ρ) = (4/τ)·sigmoid(τ·(ρ − 1)), τ = τ_pos for A > 0 and τ_neg for A ≤ 0; ρ = exp(clamp(logπ −
    logπ_old, ±20)).

    Shapes and `rollout_is_weights` as in `vanilla`; τ_pos, τ_neg: `tau_pos`, `tau_neg`, above 0. The gate's
    slope is 1 at ρ = 1 and falls off on both sides, for A ≤ 0 a little faster. `loss_agg_mode` None:
    seq-mean-token-mean. Metrics, as means over tokens: `actor/pg_gate` (the slope 4·p·(1 − p), p =
    sigmoid(τ·(ρ − 1)): 1 where nothing is held back, near 0 where a hard clip would have been),
    `actor/ppo_kl` (logπ_old − logπ). Left out: nothing.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    a = tokens.advantages
    tau = torch.where(a > 0, a.new_tensor(tau_pos), a.new_tensor(tau_neg))
    gate = (tau * (tokens.log_ratio.exp() - 1.0)).sigmoid()
    mode = loss_agg_mode or "seq-mean-token-mean"
    fractions = {"actor/pg_gate": 4.0 * gate * (1.0 - gate)}
    return finish_loss(
        tokens, -a * (4.0 / tau) * gate, scale, rollout_is_weights, mode, loss_scale_factor, fractions
    )
