"""Helpers of estimators with one advantage a row: token rewards to scores, and back to tokens."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import GroupStatistics, group_statistics
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.masked import masked_sum, zero_outside


def scored(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor
) -> tuple[Tensor, Tensor, GroupStatistics]:
    """Mask [B, R] bool, scores s = Σ_t r_t over sampled tokens [B] float, and their statistics in each group.

    Only rows with a sampled token count in their group.
    """
    mask = response_mask.bool()
    scores = masked_sum(token_level_rewards, mask, dim=-1)
    return mask, scores, group_statistics(scores, mask.any(dim=-1), group_ids)


def learned_from(mask: Tensor, loss_mask: Tensor | None) -> Tensor:
    """[B, R] bool: the tokens of the mask that `loss_mask` leaves in, over which advantages are whitened;
    without one, all of them.
    """
    if loss_mask is None:
        return mask
    return mask & loss_mask.bool()


def on_every_token(per_row: Tensor, mask: Tensor) -> Advantages:
    """The advantage [B] of a row on each of its tokens of the mask [B, R] bool. Returns are the same: there
    is no critic to teach.
    """
    per_token = zero_outside(per_row.unsqueeze(-1).expand(mask.shape), mask)
    return Advantages(advantages=per_token, returns=per_token.clone())
