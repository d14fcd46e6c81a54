"""How stale the tokens of a batch are, and how far the policy that sampled them is from the one that trains.

    policy_version, version of the training step ──► staleness by trajectory ──► spans and staleness [K]
    staleness by token                           ──► part of the tokens for each staleness 0, 1, 2, …
    logπ_old, logπ_rollout, staleness by token   ──► k3 and ratio for each staleness

Staleness is the number of training steps between the weights that sampled a token and those that it trains.
Nothing has a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import Ratio, masked_sum, zero_outside


class TrajectoryStaleness(NamedTuple):
    """Numbers of the trajectories that have sampled tokens, each [K] int64."""

    newest: Tensor
    """Staleness of the token that the newest weights sampled, in steps."""
    oldest: Tensor
    """Staleness of the token that the oldest weights sampled, in steps."""
    spans: Tensor
    """Steps between the oldest and the newest weights of a trajectory; 0: one version sampled all of it."""


def trajectory_staleness(policy_version: Tensor, mask: Tensor, version: int) -> TrajectoryStaleness:
    """Return the staleness of trajectories [B, R] that are trained under weights of `version`.

    policy_version [B, R] int: the version that sampled each token; mask [B, R] bool: the sampled tokens.
    Rows without any are left out.
    """
    rows = mask.any(-1)
    age = (version - policy_version.long())[rows]
    inside = mask[rows]
    far = torch.iinfo(torch.int64)
    newest = torch.where(inside, age, far.max)
    oldest = torch.where(inside, age, far.min)
    if not len(age):
        return TrajectoryStaleness(age.new_empty(0), age.new_empty(0), age.new_empty(0))
    low = newest.amin(-1)
    high = oldest.amax(-1)
    return TrajectoryStaleness(low, high, high - low)


def tokens_by_staleness(mask: Tensor, staleness: Tensor) -> dict[int, Ratio]:
    """Return for each staleness in the batch, ascending, the part of all tokens that is so old, as
    (numerator, denominator).

    mask [B, R] bool; staleness [B, R] int, steps.
    """
    ages, counts = torch.unique(staleness[mask], return_counts=True)
    return {age: (count.double(), mask.sum()) for age, count in zip(ages.tolist(), counts, strict=True)}


def mismatch_by_staleness(
    old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, staleness: Tensor
) -> dict[int, dict[str, Ratio]]:
    """Return for each staleness in the batch, ascending: `k3_kl`, the mean of e^logr − 1 − logr; `ratio`, the
    mean of e^logr; logr = clamp(logπ_old − logπ_rollout, ±20).

    old_log_prob, rollout_log_prob [B, R] float, nats; mask [B, R] bool; staleness [B, R] int, steps.
    Everything in float64, as (numerator, denominator), so that parts of a batch can be added up. k3 is the
    estimator of John Schulman, "Approximating KL divergence" (2020).
    """
    old = zero_outside(old_log_prob, mask).detach().double()
    rollout = zero_outside(rollout_log_prob, mask).detach().double()
    log_ratio = (old - rollout).clamp(-20.0, 20.0)
    found: dict[int, dict[str, Ratio]] = {}
    for age in torch.unique(staleness[mask]).tolist():
        tokens = mask & (staleness == age)
        count = tokens.sum()
        found[age] = {
            "k3_kl": (masked_sum(log_ratio.expm1() - log_ratio, tokens), count),
            "ratio": (masked_sum(log_ratio.exp(), tokens), count),
        }
    return found
