"""Advantage estimators by name (`algorithm.adv_estimator`): token rewards in, advantages and returns out.

To add one: a file with its function, a line in `catalog.py`, its keys in the configuration, a test. From
outside the project: `path/to/file.py:name`, or `register_adv_est`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hybridflow.algorithms.advantages.types import AdvantageEstimator, Advantages
from hybridflow.algorithms.catalog import ESTIMATORS, FunctionTable, load

_Function = TypeVar("_Function", bound=Callable[..., Any])

ADVANTAGE_ESTIMATORS: FunctionTable[AdvantageEstimator] = FunctionTable(
    "advantage estimator", ESTIMATORS, lambda name: AdvantageEstimator.of(load(ESTIMATORS[name].path))
)


def register_adv_est(name: str) -> Callable[[_Function], _Function]:
    """Make a function of yours an estimator by name; it gets what its arguments name.

    Example: `@register_adv_est("mine")` above `def mine(token_level_rewards, response_mask, group_ids, **_)
    -> Advantages`. Raises ConfigError for a name that is taken.
    """

    def add(function: _Function) -> _Function:
        ADVANTAGE_ESTIMATORS.add(name, AdvantageEstimator.of(function))
        return function

    return add


__all__ = ["ADVANTAGE_ESTIMATORS", "AdvantageEstimator", "Advantages", "register_adv_est"]
