"""Group-relative advantages: GRPO (2402.03300) and, without the division, Dr.GRPO (2503.20783)."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_statistics
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.masked import masked_sum, zero_outside

EPSILON = 1e-6


def grpo(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, norm_by_std: bool) -> Advantages:
    """A = (s − μ_g)/(σ_g + 1e-6) on every token of a row, or s − μ_g without `norm_by_std`; s = Σ_t r_t over sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses of one prompt.
    μ_g, σ_g are mean and Bessel-corrected deviation of the group's rows with a sampled token. A row alone in its group gets 0, and so
    do all rows of a group whose scores are equal. Returns are the advantages: there is no critic to teach.
    """
    mask = response_mask.bool()
    scores = masked_sum(token_level_rewards, mask, dim=-1)
    group = group_statistics(scores, mask.any(dim=-1), group_ids)
    advantages = scores - group.mean
    if norm_by_std:
        advantages = advantages / (group.std + EPSILON)
    per_token = zero_outside(advantages.where(group.varies, 0.0).unsqueeze(-1).expand(mask.shape), mask)
    return Advantages(advantages=per_token, returns=per_token.clone())
