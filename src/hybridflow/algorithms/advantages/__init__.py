"""Advantage estimators by name (`algorithm.adv_estimator`): token rewards in, advantages and returns out.

To add one: a file with its function, a line in the table, its facts in `config/algorithm_names.py`, its keys
in the configuration, a test. From outside the project: `path/to/file.py:name`, or `register_adv_est`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.gdpo import gdpo
from hybridflow.algorithms.advantages.gpg import gpg
from hybridflow.algorithms.advantages.grpo import grpo
from hybridflow.algorithms.advantages.grpo_passk import grpo_passk
from hybridflow.algorithms.advantages.max_rl import max_rl
from hybridflow.algorithms.advantages.on_policy_distillation import on_policy_distillation
from hybridflow.algorithms.advantages.online_dpo import online_dpo
from hybridflow.algorithms.advantages.opo import opo
from hybridflow.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from hybridflow.algorithms.advantages.prime import prime
from hybridflow.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from hybridflow.algorithms.advantages.remax import remax
from hybridflow.algorithms.advantages.rloo import rloo
from hybridflow.algorithms.advantages.spin import spin
from hybridflow.algorithms.advantages.sppo import sppo
from hybridflow.algorithms.advantages.types import AdvantageEstimator, Advantages
from hybridflow.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": AdvantageEstimator.of(gae),
    "grpo": AdvantageEstimator.of(grpo),
    "grpo_passk": AdvantageEstimator.of(grpo_passk),
    "gdpo": AdvantageEstimator.of(gdpo),
    "rloo": AdvantageEstimator.of(rloo),
    "reinforce_plus_plus": AdvantageEstimator.of(reinforce_plus_plus),
    "reinforce_plus_plus_baseline": AdvantageEstimator.of(reinforce_plus_plus_baseline),
    "remax": AdvantageEstimator.of(remax),
    "opo": AdvantageEstimator.of(opo),
    "gpg": AdvantageEstimator.of(gpg),
    "optimal_token_baseline": AdvantageEstimator.of(optimal_token_baseline),
    "tir_optimal_token_baseline": AdvantageEstimator.of(tir_optimal_token_baseline),
    "max_rl": AdvantageEstimator.of(max_rl),
    "prime": AdvantageEstimator.of(prime),
    "sppo": AdvantageEstimator.of(sppo),
    "online_dpo": AdvantageEstimator.of(online_dpo),
    "spin": AdvantageEstimator.of(spin),
    "on_policy_distillation": AdvantageEstimator.of(on_policy_distillation),
}


def register_adv_est(name: str) -> Callable[[_Function], _Function]:
    """Make a function of yours an estimator by name; it gets what its arguments name.

    Example: `@register_adv_est("mine")` above `def mine(token_level_rewards, response_mask, group_ids, **_)
    -> Advantages`. Raises ConfigError for a name that is taken.
    """

    def add(function: _Function) -> _Function:
        if name in ADVANTAGE_ESTIMATORS:
            raise ConfigError(
                f"advantage estimator {name!r} exists already: give yours another name than "
                f"{', '.join(ADVANTAGE_ESTIMATORS)}"
            )
        ADVANTAGE_ESTIMATORS[name] = AdvantageEstimator.of(function)
        return function

    return add


__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "Advantages",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "max_rl",
    "on_policy_distillation",
    "online_dpo",
    "opo",
    "optimal_token_baseline",
    "prime",
    "register_adv_est",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "spin",
    "sppo",
    "tir_optimal_token_baseline",
]
