"""Group statistics over scores, broadcast to rows; token rewards to scores, and the advantages of rows to
tokens.

    scores [B], counts [B] bool, group_ids [B] int64, any numbers ──► sum, maximum, mean and deviation, the
    one best row of each group

A row counts where the policy sampled a token of it. The values of a row that does not count, NaN included,
have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import masked_sum, zero_outside


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group, [B] each."""

    size: Tensor
    """int64: number of rows of the group that count."""
    mean: Tensor
    """float."""
    centred: Tensor
    """float: the row's score minus the mean, subtracted before rounding; 0 where a row does not count."""
    std: Tensor
    """float, Bessel-corrected; 0 for fewer than two rows."""
    varies: Tensor
    """bool: the largest score is not the smallest, decided on the scores themselves and not after rounding.
    """


def group_statistics(scores: Tensor, counts: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Mean and deviation of scores [B] float over the rows of each group where `counts` [B] bool.

    group_ids [B] int64. Sums and differences are taken in float64, so that a large offset of all scores does
    not round their differences away; what is returned has the dtype of `scores`.
    """
    exact = torch.where(counts, scores, 0.0).double()
    size = group_sum(counts.double(), group_ids)
    mean = group_sum(exact, group_ids) / size.clamp(min=1)
    centred = torch.where(counts, exact - mean, 0.0)
    squares = group_sum(centred.square(), group_ids).to(scores.dtype)
    others = (size - 1).clamp(min=1).to(scores.dtype)
    varies = group_max(scores, counts, group_ids) > -group_max(-scores, counts, group_ids)
    return GroupStatistics(
        size=size.to(torch.int64),
        mean=mean.to(scores.dtype),
        centred=centred.to(scores.dtype),
        std=(squares / others).sqrt(),
        varies=varies,
    )


def group_sum(x: Tensor, group_ids: Tensor) -> Tensor:
    """Sum of x [B, ...] over the rows of each group, in the shape of x."""
    group, num_groups = _numbered(group_ids)
    return x.new_zeros(num_groups, *x.shape[1:]).index_add(0, group, x)[group]


def group_max(scores: Tensor, counts: Tensor, group_ids: Tensor) -> Tensor:
    """The highest score [B] of each row's group; −inf where no row of it counts."""
    group, num_groups = _numbered(group_ids)
    lowest = scores.new_full((num_groups,), -torch.inf)
    return lowest.scatter_reduce(0, group, torch.where(counts, scores, -torch.inf), "amax")[group]


def group_best(scores: Tensor, counts: Tensor, group_ids: Tensor, row_id: Tensor | None = None) -> Tensor:
    """Return [B] bool: the row with the highest score of each group, one row a group.

    Of equal scores the row with the smallest row id [B] int64 is taken, without row ids the first. A group
    without a row that counts has no best row.
    """
    order = counts.nonzero().squeeze(-1)
    if row_id is not None:
        order = order[torch.argsort(row_id[order], stable=True)]
    order = order[torch.argsort(scores[order], stable=True, descending=True)]
    order = order[torch.argsort(group_ids[order], stable=True)]
    ids = group_ids[order]
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    return torch.zeros_like(counts).index_fill(0, order[first], True)


def _numbered(group_ids: Tensor) -> tuple[Tensor, int]:
    _, group = torch.unique(group_ids, return_inverse=True)
    return group, int(group.max()) + 1 if group.numel() else 0


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
