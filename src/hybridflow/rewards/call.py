"""One call of a reward function, or of a manager: Outcomes come out, never an exception, whatever it does.

A manager scores all responses of a step in one call (`reward.manager`):

    rows, each with what a reward function is called with ──manager──► results, one for each row
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.data.plugin import awaited, load_function
from hybridflow.errors import HybridFlowError, RewardError
from hybridflow.processes.errors import CallRaised
from hybridflow.rewards.compose import BATCH
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.result import normalize_result, token_scores_of

Manager = Callable[[list[dict[str, Any]]], Any]


def call(function: RewardFunction, request: ScoreRequest) -> Outcome:
    """Score one request; where the function gives a coroutine, it is run to its end."""
    started = time.perf_counter()
    try:
        result = function.function(**function.arguments(request.row()))
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        return outcome_of(result, request, started)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's callable; sys.exit() inside it is its error too
        return failure(error, time.perf_counter() - started)


async def call_async(function: RewardFunction, request: ScoreRequest, timeout: float) -> Outcome:
    """Score one request by an async function, cancelled after `timeout` seconds."""
    started = time.perf_counter()
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            result = await function.function(**function.arguments(request.row()))
            return outcome_of(result, request, started)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's callable
        seconds = time.perf_counter() - started
        if not deadline.expired():
            return failure(error, seconds)
        detail = f"the reward function ran past reward.timeout={timeout:g} seconds"
        return Outcome(error="timeout", detail=detail, seconds=seconds)


def load_manager(config: RewardConfig, function: RewardFunction) -> Manager | None:
    """Load the manager that the keys choose, with the reward function that it may use; None: there is none.

    Raises ConfigError if a user's class cannot be found.
    """
    if config.manager is None:
        return None
    if config.manager == BATCH:
        return function.function

    async def compute_score(*positional: Any, **row: Any) -> Any:
        return await function(*positional, **row)

    manager: Manager = load_function(config.manager, key="reward.manager")(
        compute_score if function.is_async else function
    )
    return manager


def call_manager(
    manager: Manager, function: RewardFunction, requests: Sequence[ScoreRequest]
) -> list[Outcome]:
    """Score all requests; where the manager fails, each has its error."""
    started = time.perf_counter()
    try:
        results = manager([function.row_for_manager(request.row()) for request in requests])
        if inspect.isawaitable(results):
            results = asyncio.run(awaited(results))
        results = list(results)
        if len(results) != len(requests):
            raise RewardError(
                f"the reward manager returned {len(results)} results for {len(requests)} responses; wanted "
                "one for each"
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's code
        return [failure(error, time.perf_counter() - started)] * len(requests)
    outcomes = []
    for result, request in zip(results, requests, strict=True):
        try:
            outcomes.append(outcome_of(result, request, started))
        except Exception as error:  # a result that is none, of this row only
            outcomes.append(failure(error, time.perf_counter() - started))
    return outcomes


def failure(error: BaseException, seconds: float) -> Outcome:
    """Return the outcome of a sample whose function raised; errors that are not ours keep their traceback."""
    if isinstance(error, HybridFlowError):
        detail = str(error)
    else:
        detail = CallRaised.by(error).traceback_text
    return Outcome(error=type(error).__name__, detail=detail, seconds=seconds)


def outcome_of(result: Any, request: ScoreRequest, started: float) -> Outcome:
    """Return the outcome of a result. Raises RewardError if it is none that a reward function may return."""
    token_scores = token_scores_of(result, len(request.response_ids))
    if token_scores:
        whole = {}
        if isinstance(result, Mapping):
            whole = dict(result)
        result = {**whole, "score": math.fsum(token_scores)}
    score, extras = normalize_result(result)
    return Outcome(score, extras, seconds=time.perf_counter() - started, token_scores=token_scores)
