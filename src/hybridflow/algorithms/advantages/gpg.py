"""Group policy gradient: GPG, Chu et al., 2504.02546."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import on_every_token, scored
from hybridflow.algorithms.advantages.grpo import against_the_group
from hybridflow.algorithms.advantages.types import Advantages


def gpg(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Advantages:
    """A = α·(s − μ_g) on every token of a row; α = rows / rows in groups whose scores vary; s = Σ_t r_t over
    sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt. μ_g is the mean of the group's rows with a sampled token; only such rows are counted in α.
    It makes up for the groups that say nothing, so that their number does not shrink the gradient. A row
    alone in its group gets 0, and so do all rows of a group whose scores are equal. Its loss is `loss_mode:
    gpg`, −A·logπ without clipping.

    Left out: the paper's resampling until enough groups vary, which is `algorithm.filter_groups`.
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    counts = mask.any(dim=-1)
    factor = counts.sum().to(group.mean.dtype) / (counts & group.varies).sum().clamp(min=1)
    return on_every_token(factor * against_the_group(group, norm_by_std=False), mask)
