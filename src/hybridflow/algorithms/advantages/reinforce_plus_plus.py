"""REINFORCE++: returns whitened over the whole batch, without and with a group's mean as baseline. Hu et al.,
2501.03262.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import learned_from, on_every_token, scored
from hybridflow.algorithms.advantages.grpo import against_the_group
from hybridflow.algorithms.advantages.recursion import discounted_sum
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import masked_whiten


def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float, loss_mask: Tensor | None = None
) -> Advantages:
    """G_t = r_t + γ·G_next, right to left over sampled tokens; A = whiten(G); returns = G.

    token_level_rewards [B, R] float, in units of the score; response_mask [B, R] bool. Tokens that the policy
    did not sample are no steps: G passes them unchanged. Whitening (mean and Bessel variance, rsqrt(var +
    1e-8)) is over the tokens of `loss_mask` (default: `response_mask`) of the whole batch. One response a
    prompt is enough.

    Left out: the paper's KL penalty in each token's reward is a key of its own
    (`algorithm.use_kl_in_reward`).
    """
    mask = response_mask.bool()
    returns = discounted_sum(token_level_rewards, mask, gamma)
    return Advantages(advantages=masked_whiten(returns, learned_from(mask, loss_mask)), returns=returns)


def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, loss_mask: Tensor | None = None
) -> Advantages:
    """A = whiten(s − μ_g), where s − μ_g stands on every token of a row; s = Σ_t r_t over sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt. μ_g is the mean of the group's rows with a sampled token. Whitening (mean and Bessel
    variance, rsqrt(var + 1e-8)) is over the tokens of `loss_mask` (default: `response_mask`) of the whole
    batch, so a long row weighs more. A row alone in its group and the rows of a group whose scores are equal
    take part in it with 0, and get exactly 0 (in the paper they get −mean/deviation).

    Left out: the paper's KL loss is a key of its own (`actor.use_kl_loss`, `kl_loss_type: k2`).
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    centred = on_every_token(against_the_group(group, norm_by_std=False), mask).advantages
    advantages = masked_whiten(centred, learned_from(mask, loss_mask)).where(group.varies.unsqueeze(-1), 0.0)
    return Advantages(advantages=advantages, returns=advantages.clone())
