"""Managers, which score all responses of a step in one call: `reward.manager`.

rows, each with what a reward function is called with ──manager──► results, one for each row
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.config.own_code import CALLED_WITH, CALLED_WITH_LISTS
from hybridflow.config.reward import RewardConfig
from hybridflow.data.plugin import awaited, load_function
from hybridflow.errors import RewardError
from hybridflow.rewards.call import arguments_of, failure, outcome_of
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.table import RewardFunction

Manager = Callable[[list[dict[str, Any]]], Any]
BATCH = "batch"


def load_manager(config: RewardConfig, function: RewardFunction) -> Manager | None:
    """Load the manager that the keys choose, with the reward function that it may use; None: there is none.

    Raises ConfigError if a user's class cannot be found.
    """
    if config.manager is None:
        return None
    if config.manager == BATCH:
        return lambda rows: function(**_columns(rows))
    manager: Manager = load_function(config.manager, key="reward.manager")(function)
    return manager


def call_manager(
    manager: Manager, function: RewardFunction, requests: Sequence[ScoreRequest]
) -> list[Outcome]:
    """Score all requests; where the manager fails, each has its error."""
    started = time.perf_counter()
    try:
        results = manager([arguments_of(function, request) for request in requests])
        if inspect.isawaitable(results):
            results = asyncio.run(awaited(results))
        results = list(results)
        if len(results) != len(requests):
            raise RewardError(
                f"the reward manager returned {len(results)} results for {len(requests)} responses; wanted "
                "one for each"
            )
    except BaseException as error:  # a user's code
        if isinstance(error, KeyboardInterrupt):
            raise
        return [failure(error, time.perf_counter() - started)] * len(requests)
    outcomes = []
    for result, request in zip(results, requests, strict=True):
        try:
            outcomes.append(outcome_of(result, request, started))
        except Exception as error:  # a result that is none, of this row only
            outcomes.append(failure(error, time.perf_counter() - started))
    return outcomes


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict(zip(CALLED_WITH, CALLED_WITH_LISTS, strict=True))
    return {names.get(name, name): [row[name] for row in rows] for name in rows[0]}
