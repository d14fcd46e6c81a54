"""Maximum likelihood reinforcement learning: MaxRL, Tajwar et al., 2602.02710."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import on_every_token, scored
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.errors import ConfigError


def max_rl(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Advantages:
    """A = (s − μ_g)/μ_g on every token of a row where μ_g > 0, else 0; s = Σ_t r_t over sampled tokens.

    token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal for the responses
    of one prompt. μ_g is the mean of the group's rows with a sampled token. With scores 0 and 1, μ_g is the
    rate of success, and dividing by it turns the gradient of the rate into that of its logarithm: hard
    prompts weigh more. A row alone in its group gets 0, and so do all rows of a group whose scores are equal.
    Raises ConfigError for a score below 0, which is no likelihood.

    Left out: nothing of its estimator; the truncation order of the paper's series is the group's size.
    """
    mask, scores, group = scored(token_level_rewards, response_mask, group_ids)
    below = scores[scores < 0]
    if below.numel():
        raise ConfigError(
            f"algorithm.adv_estimator=max_rl needs scores of 0 or more, got {float(below.min()):g} (rows "
            f"below 0: {below.numel()}): "
            "take a reward between 0 and 1, without KL in the reward (algorithm.use_kl_in_reward=false) and "
            "without penalties"
        )
    likely = group.varies & (group.mean > 0)
    return on_every_token(group.centred.where(likely, 0.0) / group.mean.where(likely, 1.0), mask)
