"""The pairs of online DPO, chosen among the responses of a group: Guo et al., 2402.04792."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_best, on_every_token, scored
from hybridflow.algorithms.advantages.types import Advantages


def online_dpo(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, row_id: Tensor | None = None
) -> Advantages:
    """A = +1 on every token of the group's best row, −1 on the worst, 0 on all others; best and worst by s =
    Σ_t r_t over sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids, row_id [B] int64. Of equal scores
    the smallest row id is taken (without ids, the first row), for the best and for the worst alike. A group
    whose scores are all equal has no pair, and its rows get 0. The signs mark chosen and rejected for the
    loss `dpo`.

    Left out: the paper's judge, a model that is asked which of two responses is better; here the scores
    decide.
    """
    mask, scores, group = scored(token_level_rewards, response_mask, group_ids)
    counts = mask.any(dim=-1)
    sign = group_best(scores, counts, group_ids, row_id).to(scores.dtype) - group_best(
        -scores, counts, group_ids, row_id
    ).to(scores.dtype)
    return on_every_token(sign.where(group.varies, 0.0), mask)
