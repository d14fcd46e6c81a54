"""Generalised advantage estimation, Schulman et al., 1506.02438."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.masked import masked_whiten, zero_outside


def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    loss_mask: Tensor | None = None,
) -> Advantages:
    """δ_t = r_t + γ·V_next − V_t; L_t = δ_t + γλ·L_next, right to left; returns = L + V; advantages = whitened L.

    token_level_rewards, values [B, R] float, in units of the score; response_mask [B, R] bool. Tokens that the policy did not sample
    are no steps: V_next and L pass them unchanged. After the last token V_next = 0: a row cut at the length limit counts as ended.
    The recursion runs on `response_mask`, whitening over `loss_mask` (default: the same).
    """
    mask = response_mask.bool()
    rewards, state_values = zero_outside(token_level_rewards, mask), zero_outside(values, mask)
    running = torch.zeros_like(rewards)
    following_value = following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following_value - state_values[:, t]
        following = torch.where(mask[:, t], delta + gamma * lam * following, following)
        following_value = torch.where(mask[:, t], state_values[:, t], following_value)
        running[:, t] = following
    learn = mask if loss_mask is None else loss_mask
    return Advantages(advantages=masked_whiten(running, learn), returns=zero_outside(running + state_values, mask))
