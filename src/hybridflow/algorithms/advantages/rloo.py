"""REINFORCE with a leave-one-out baseline: RLOO, Ahmadian et al., 2402.14740."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import GroupStatistics, on_every_token, scored
from hybridflow.algorithms.advantages.types import Advantages


def rloo(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Advantages:
    """A = n/(n − 1)·(s − μ_g) on every token of a row, which is s minus the mean score of the group's other
    rows.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt. s = Σ_t r_t over sampled tokens; n and μ_g are number and mean of the group's rows with a
    sampled token. A row alone in its group has no others to compare with and gets 0, and so do all rows of a
    group whose scores are equal.

    Left out: nothing; the paper's loss is plain REINFORCE on whole responses (`loss_mode: reinforce`).
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    return on_every_token(leave_one_out(group), mask)


def leave_one_out(group: GroupStatistics) -> Tensor:
    """s minus the mean of the group's other rows, [B] float; exactly 0 in a group that does not vary."""
    n = group.size.to(group.centred.dtype)
    return (n / (n - 1).clamp(min=1) * group.centred).where(group.varies, 0.0)
