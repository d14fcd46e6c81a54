"""The pairs of self-play fine-tuning: SPIN, Chen et al., 2401.01335."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_sum, on_every_token
from hybridflow.algorithms.advantages.types import Advantages


def spin(response_mask: Tensor, is_demonstration: Tensor, group_ids: Tensor) -> Advantages:
    """A = +1 on every token of the data's own answer, −1 on every sampled response to the same prompt; 0 in a
    group without both.

    response_mask [B, R] bool, on a demonstration the tokens of its answer; is_demonstration [B] bool;
    group_ids [B] int64, equal for the responses of one prompt. Only rows with a token count. The signs mark
    chosen and rejected for the loss `dpo`, which pairs every demonstration with every sampled response of its
    group. There is no score: the data is what to win against.

    Left out: the paper's rounds of several epochs on one set of samples; samples are fresh each step, and the
    reference (the opponent) is renewed every `algorithm.ref_update_freq` steps.
    """
    mask = response_mask.bool()
    shown = is_demonstration.bool()
    counts = mask.any(dim=-1)
    num_shown = group_sum((counts & shown).to(torch.int64), group_ids)
    num_sampled = group_sum((counts & ~shown).to(torch.int64), group_ids)
    sign = torch.where(shown, 1.0, -1.0).where((num_shown > 0) & (num_sampled > 0), 0.0)
    return on_every_token(sign, mask)
