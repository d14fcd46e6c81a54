"""Group-relative advantages: GRPO (2402.03300) and, without the division, Dr.GRPO (2503.20783)."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import GroupStatistics, on_every_token, scored
from hybridflow.algorithms.advantages.types import Advantages

EPSILON = 1e-6


def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, norm_by_std: bool
) -> Advantages:
    """A = (s − μ_g)/(σ_g + 1e-6), or s − μ_g without `norm_by_std`, on every token of a row; s = Σ_t r_t over
    sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt. μ_g, σ_g are mean and Bessel-corrected deviation of the group's rows with a sampled token.
    A row alone in its group gets 0, and so do all rows of a group whose scores are equal. Returns are the
    advantages: there is no critic to teach.

    Left out: the papers' rewards for single steps (process supervision); the reward model's place is the
    reward's.
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    return on_every_token(against_the_group(group, norm_by_std=norm_by_std), mask)


def against_the_group(group: GroupStatistics, *, norm_by_std: bool) -> Tensor:
    """(s − μ_g)/(σ_g + 1e-6), or s − μ_g, [B] float; exactly 0 in a group that does not vary."""
    advantages = group.centred
    if norm_by_std:
        advantages = advantages / (group.std + EPSILON)
    return advantages.where(group.varies, 0.0)
