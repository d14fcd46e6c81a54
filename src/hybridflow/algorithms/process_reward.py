"""The implicit process reward of PRIME (2502.01456): a policy trained on outcomes alone is a reward model of
every token.

logπ_rm, logπ_ref ──implicit_rewards───► q [B, R], what the estimator `prime` takes
                 └─process_reward_loss─► cross-entropy against the outcome, by which logπ_rm learns
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hybridflow.algorithms.aggregation import LossOutput, LossScale, masked_sum, zero_outside
from hybridflow.errors import ConfigError


def implicit_rewards(
    log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, *, beta: float, granularity: str
) -> Tensor:
    """q_t = β·(logπ_rm − logπ_ref) of each token (granularity `token`), or their sum on the row's last token
    (`whole`).

    log_prob, ref_log_prob [B, R] float, nats: of the reward model and of its reference on the sampled tokens,
    mask [B, R] bool. Returns [B, R] float without gradient, 0 outside the mask. β: `beta`. Raises ConfigError
    for another granularity. PRIME, 2502.01456, from implicit PRMs, 2412.01981. Left out: rewards that another
    λ has smoothed over tokens.
    """
    if granularity not in ("token", "whole"):
        raise ConfigError(f"reward.process_reward_model.granularity got {granularity!r}: set token or whole")
    rewards = beta * (zero_outside(log_prob, mask) - zero_outside(ref_log_prob, mask)).detach()
    if granularity == "token":
        return rewards
    positions = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask.bool(), positions, -1).amax(-1, keepdim=True)
    return torch.where(positions == last, rewards.sum(-1, keepdim=True), 0.0)


def process_reward_loss(
    log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor, outcome: Tensor, scale: LossScale, *, beta: float
) -> LossOutput:
    """−o·logσ(h) − (1 − o)·logσ(−h) with h = β·Σ_t (logπ_rm − logπ_ref): cross-entropy of each row's outcome
    o, the mean over rows.

    log_prob (with gradient), ref_log_prob [B, R] float, nats; mask [B, R] bool: the sampled tokens; outcome
    [B] bool or float in [0, 1]; `scale` counts the trajectories of the whole mini-batch, and a row weighs
    1 / number of rows of its trajectory. A row without tokens has no part in it. β: `beta`. Metrics, as means
    over rows: `process_reward/accuracy` (h > 0 where o > ½) and `process_reward/probability` (σ(h)). PRIME,
    2502.01456. Left out: the pairwise (DPO) form of the loss.
    """
    log_ratio = zero_outside(log_prob, mask) - zero_outside(ref_log_prob, mask).detach()
    h = beta * log_ratio.sum(-1)
    rows = mask.bool().any(-1)
    o = zero_outside(outcome, rows).to(h.dtype).detach()
    cross_entropy = scale.weighted(binary_cross_entropy_with_logits(h, o, reduction="none"))
    total = masked_sum(cross_entropy, rows)
    count = rows.sum()
    logits = h.detach()
    return LossOutput(
        total / scale.num_sequences if scale.num_sequences else total * 0.0,
        {
            "process_reward/accuracy": (masked_sum((logits > 0) == (o > 0.5), rows), count),
            "process_reward/probability": (masked_sum(logits.sigmoid(), rows), count),
        },
    )
