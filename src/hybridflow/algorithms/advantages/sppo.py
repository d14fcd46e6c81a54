"""The targets of self-play preference optimisation's log-ratios: SPPO, Wu et al., 2405.00675."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_max, group_sum, on_every_token, scored
from hybridflow.algorithms.advantages.types import Advantages


def sppo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    sppo_eta: float,
    sppo_beta: float,
) -> Advantages:
    """A = η·(s − softmean_β) on every token of a row; softmean_β = (1/β)·log mean_j exp(β·s_j) over the
    group; s = Σ_t r_t.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt; η = `sppo_eta`, β = `sppo_beta` above 0. The mean is over the group's rows with a sampled
    token. The number is no policy-gradient advantage but a target: the loss `sppo` draws Σ_t (logπ −
    logπ_old) of the row to it. A row alone in its group gets 0, and so do all rows of a group whose scores
    are equal.

    Left out: the paper's P(y beats π) − ½ from a preference model, for which s − softmean_β of scalar scores
    stands.
    """
    mask, scores, group = scored(token_level_rewards, response_mask, group_ids)
    counts = mask.any(dim=-1)
    top = group_max(scores, counts, group_ids).where(group.size > 0, 0.0)
    mean = group_sum(
        torch.where(counts, (sppo_beta * (scores - top)).exp(), 0.0), group_ids
    ) / group.size.clamp(min=1)
    # both about the highest score, so that a large offset of all scores does not round the differences away
    softmean = mean.where(group.size > 0, 1.0).log() / sppo_beta
    return on_every_token((sppo_eta * (scores - top - softmean)).where(group.varies, 0.0), mask)
