"""A teacher's log-probabilities on the student's own samples: on-policy distillation, Agarwal et al.,
2306.13649 (reverse KL).
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import zero_outside


def on_policy_distillation(
    old_log_probs: Tensor, teacher_log_probs: Tensor, response_mask: Tensor
) -> Advantages:
    """A_t = logπ_teacher,t − logπ_student,t on each sampled token; no score is asked for.

    old_log_probs (the student's), teacher_log_probs [B, R] float, nats; response_mask [B, R] bool. A policy
    gradient with this advantage descends the reverse KL, KL(π_student ‖ π_teacher), token by token: each
    token's own term alone, as if γ were 0. Returns are the advantages.

    Left out: the mix with the data's own answers. Divergences of whole distributions are terms of the loss
    (`algorithms/divergence.py`).
    """
    mask = response_mask.bool()
    advantages = zero_outside(teacher_log_probs, mask) - zero_outside(old_log_probs, mask)
    return Advantages(advantages=advantages, returns=advantages.clone())
