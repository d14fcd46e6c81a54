"""REINFORCE against the score of the greedy response: ReMax, Li et al., 2310.10505."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.recursion import discounted_sum
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import at_least_float32, zero_outside


def remax(token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor) -> Advantages:
    """A_t = Σ_{t' ≥ t} r_t' − b on each sampled token; b the score of the greedy response to the same prompt;
    returns = Σ_{t' ≥ t} r_t'.

    token_level_rewards [B, R] float; response_mask [B, R] bool; reward_baselines [B] float, in units of the
    score. One response a prompt is enough: the baseline comes from one more rollout at temperature 0.

    Left out: nothing.
    """
    mask = response_mask.bool()
    returns = discounted_sum(token_level_rewards, mask, 1.0)
    return Advantages(
        advantages=zero_outside(returns - at_least_float32(reward_baselines).unsqueeze(-1), mask),
        returns=returns,
    )
