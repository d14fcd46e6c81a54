"""On-policy RL with the optimal reward baseline: OPO, Hao et al., 2505.23585."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_sum, on_every_token, scored
from hybridflow.algorithms.advantages.types import Advantages


def opo(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Advantages:
    """A = s − Σ_j len_j·s_j / Σ_j len_j on every token of a row, the sums over the group's rows; s = Σ_t r_t
    over sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt; len_j the sampled tokens of row j. The baseline of least variance weighs a row by its
    squared gradient, which grows with its length. A row alone in its group gets 0, and so do all rows of a
    group whose scores are equal.

    Left out: the paper trains exactly on-policy, one update a batch: that is the batch sizes' matter.
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    length = mask.sum(-1).to(group.centred.dtype)
    shift = group_sum(length * group.centred, group_ids) / group_sum(length, group_ids).clamp(min=1)
    return on_every_token((group.centred - shift).where(group.varies, 0.0), mask)
