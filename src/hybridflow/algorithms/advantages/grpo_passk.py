"""Advantages for the best of k: only a group's best response learns, by its lead. Tang et al., 2503.19595."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_best, group_max, on_every_token, scored
from hybridflow.algorithms.advantages.grpo import EPSILON
from hybridflow.algorithms.advantages.types import Advantages


def grpo_passk(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, norm_by_std: bool
) -> Advantages:
    """A = (s_1st − s_2nd)/(σ_g + 1e-6), or s_1st − s_2nd without `norm_by_std`, on every token of the group's
    best row; 0 on all others.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt. s = Σ_t r_t over sampled tokens, s_1st and s_2nd the two highest of the group, σ_g their
    Bessel-corrected deviation. Where two rows share the highest score the lead is 0, and so is every
    advantage of the group: no tie is there to break. A row alone gets 0.

    This is the leave-one-out baseline of the objective max(s_1 … s_n), k = n: without a row the maximum falls
    from s_1st to s_2nd for the best one and stays for the others. Left out: k < n, and the paper's objectives
    other than the maximum; the division by σ_g is GRPO's.
    """
    mask, scores, group = scored(token_level_rewards, response_mask, group_ids)
    counts = mask.any(dim=-1)
    best = group_best(scores, counts, group_ids)
    lead = scores - group_max(scores, counts & ~best, group_ids)
    if norm_by_std:
        lead = lead / (group.std + EPSILON)
    return on_every_token(lead.where(best & group.varies, 0.0), mask)
