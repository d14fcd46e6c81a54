"""The check that a row has a ground truth, made by every built-in function that compares with it."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import RewardError


def required(ground_truth: Any) -> Any:
    """Return the ground truth; RewardError where the row has none, as a score of 0 would hide it."""
    if ground_truth is None:
        raise RewardError(
            "the row has no ground truth: give the data a column reward_model with ground_truth in it, "
            "or choose a reward that needs none, for example your own by "
            "reward.custom_reward_function.path=FILE.py:NAME"
        )
    return ground_truth
