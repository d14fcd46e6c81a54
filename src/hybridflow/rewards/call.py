"""One call of a reward function: an Outcome comes out, never an exception, whatever the function does."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from typing import Any

from hybridflow.data.plugin import awaited
from hybridflow.errors import HybridFlowError
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.result import normalize_result
from hybridflow.rewards.table import RewardFunction

MAX_TRACEBACK = 4000
"""Characters that are kept of a traceback, from its end, where the error stands."""


def call(function: RewardFunction, request: ScoreRequest) -> Outcome:
    """Score one request; where the function gives a coroutine, it is run to its end."""
    started = time.perf_counter()
    try:
        result = function(**_arguments(request))
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        score, extras = normalize_result(result)
    except BaseException as error:  # a user's callable; sys.exit() inside it is its error too
        if isinstance(error, KeyboardInterrupt):
            raise
        return failure(error, time.perf_counter() - started)
    return Outcome(score, extras, seconds=time.perf_counter() - started)


async def call_async(function: RewardFunction, request: ScoreRequest, timeout: float) -> Outcome:
    """Score one request by an async function, cancelled after `timeout` seconds."""
    started = time.perf_counter()
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            score, extras = normalize_result(await function(**_arguments(request)))
    except BaseException as error:  # a user's callable
        if isinstance(error, KeyboardInterrupt):
            raise
        seconds = time.perf_counter() - started
        if deadline.expired():
            return timed_out(timeout, seconds)
        return failure(error, seconds)
    return Outcome(score, extras, seconds=time.perf_counter() - started)


def timed_out(timeout: float, seconds: float) -> Outcome:
    """Return the outcome of a sample that ran past its deadline."""
    return Outcome(
        error="timeout",
        detail=f"the reward function ran past reward.timeout={timeout:g} seconds",
        seconds=seconds,
    )


def failure(error: BaseException, seconds: float) -> Outcome:
    """Return the outcome of a sample whose function raised; errors that are not ours keep their traceback."""
    if isinstance(error, HybridFlowError):
        detail = str(error)
    else:
        detail = "".join(traceback.format_exception(error)).strip()[-MAX_TRACEBACK:]
    return Outcome(error=type(error).__name__, detail=detail, seconds=seconds)


def _arguments(request: ScoreRequest) -> dict[str, Any]:
    return {
        "data_source": request.data_source,
        "solution_str": request.solution_str,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
    }
