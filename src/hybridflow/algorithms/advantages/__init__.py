"""Advantage estimators by name (`algorithm.adv_estimator`): token rewards in, advantages and returns out.

To add one: a file with its function, a line in the table, its keys in the configuration, a test. From outside the project:
`path/to/file.py:name`, or `register_adv_est`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.grpo import grpo
from hybridflow.algorithms.advantages.types import AdvantageEstimator, Advantages
from hybridflow.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": AdvantageEstimator(
        gae, needs=("token_level_rewards", "values", "response_mask", "gamma", "lam"), takes=("loss_mask",), needs_critic=True
    ),
    "grpo": AdvantageEstimator(grpo, needs=("token_level_rewards", "response_mask", "group_ids", "norm_by_std"), needs_group=True),
}


def register_adv_est(name: str, *, needs_group: bool = False) -> Callable[[_Function], _Function]:
    """Make a function of yours an estimator by name; it gets what its arguments name.

    Example: `@register_adv_est("mine")` above `def mine(token_level_rewards, response_mask, group_ids, **_) -> Advantages`.
    Raises ConfigError for a name that is taken.
    """

    def add(function: _Function) -> _Function:
        if name in ADVANTAGE_ESTIMATORS:
            raise ConfigError(
                f"advantage estimator {name!r} exists already: give yours another name than {', '.join(ADVANTAGE_ESTIMATORS)}"
            )
        ADVANTAGE_ESTIMATORS[name] = AdvantageEstimator.of(function, needs_group=needs_group)
        return function

    return add


__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageEstimator", "Advantages", "gae", "grpo", "register_adv_est"]
