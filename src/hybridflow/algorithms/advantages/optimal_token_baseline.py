"""The optimal token baseline, on padded and on mask-compacted positions. Li et al., 2602.07078."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_sum, scored
from hybridflow.algorithms.advantages.recursion import discounted_sum, still_to_come
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import zero_outside


def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
) -> Advantages:
    """w_t = 1 − 2π_t + Σ_v π(v)²; W_t = Σ_{t' ≤ t} w_t'; B_t = Σ_j G_jt·W_jt / Σ_j W_jt over the group;
    A_t = G_t − B_t; returns = G.

    token_level_rewards, old_log_probs (nats), sum_pi_squared (Σ_v π(v)² over the vocabulary) [B, R] float;
    response_mask [B, R] bool; group_ids [B] int64, equal for the responses of one prompt. G_t = Σ_{t' ≥ t}
    r_t' is the reward to go, π_t = exp(old_log_probs) the probability of the sampled token. w_t is the
    squared length of the gradient of logπ_t in the logits, W_t that of the row so far, and B_t the baseline
    of least variance at step t. Sums run over sampled tokens, the group's only over rows that sampled
    position t. With `rollout_is_weights` ρ̄ [B, R] float, w_t is multiplied by ρ̄_t². Beyond the second
    longest row of the group B_t = 0: the longest would be its own baseline. Where all W are 0 (a certain
    token: no gradient either) B_t is the plain mean of G_t. A row alone in its group gets 0, and so do all
    rows of a group whose scores are equal.

    Left out: nothing but the exact gradient lengths, which the paper, too, replaces by w.
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    returns = discounted_sum(token_level_rewards, mask, 1.0)
    # never below (1 − π)² but by rounding
    weight = (1.0 - 2.0 * zero_outside(old_log_probs, mask).exp() + zero_outside(sum_pi_squared, mask)).clamp(
        min=0.0
    )
    if rollout_is_weights is not None:
        weight = weight * zero_outside(rollout_is_weights, mask).square()
    so_far = zero_outside(zero_outside(weight, mask).cumsum(-1), mask)
    total = group_sum(so_far, group_ids)
    exact = returns.double()
    mean = group_sum(exact, group_ids) / group_sum(mask.double(), group_ids).clamp(min=1)
    # about the mean, so that equal returns give that return whatever their weights round to
    centred = (exact - mean).to(returns.dtype)
    shift = group_sum(centred * so_far, group_ids) / torch.where(total > 0, total, 1.0)
    in_company = group_sum((still_to_come(mask) > 0).to(torch.int64), group_ids) >= 2
    advantages = torch.where(in_company, centred - shift, returns).where(
        mask & group.varies.unsqueeze(-1), 0.0
    )
    return Advantages(advantages=advantages, returns=returns)


def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
) -> Advantages:
    """w_k = 1 − 2π_k + Σ_v π(v)²; W_k = Σ_{k' ≤ k} w_k'; B_k = Σ_j G_jk·W_jk / Σ_j W_jk over the group;
    A_k = G_k − B_k; returns = G.

    `optimal_token_baseline` for responses with tool calls (tool-integrated reasoning): k counts the sampled
    tokens of a row, so the k-th sampled token of one row is compared with the k-th of the others, wherever
    the tools' answers stand between them. Arguments, shapes and edge cases are the same; a row's length is
    the number of its sampled tokens. Source: 2602.07078.

    Left out: nothing but the exact gradient lengths, which the paper, too, replaces by w.
    """
    mask = response_mask.bool()
    order = torch.argsort(~mask, dim=-1, stable=True)

    def compacted(x: Tensor) -> Tensor:
        return x.gather(-1, order)

    out = optimal_token_baseline(
        compacted(token_level_rewards),
        compacted(mask),
        group_ids,
        compacted(old_log_probs),
        compacted(sum_pi_squared),
        rollout_is_weights=None if rollout_is_weights is None else compacted(rollout_is_weights),
    )
    back = torch.argsort(order, dim=-1)
    return Advantages(advantages=out.advantages.gather(-1, back), returns=out.returns.gather(-1, back))
