"""One call of a reward function: an Outcome comes out, never an exception, whatever the function does."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Mapping
from typing import Any

from hybridflow.config.own_code import MESSAGES, TOKENS
from hybridflow.data.plugin import awaited
from hybridflow.errors import HybridFlowError
from hybridflow.rewards.load import PROMPT, takes
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.result import normalize_result, token_scores_of
from hybridflow.rewards.table import RewardFunction

MAX_TRACEBACK = 4000
"""Characters that are kept of a traceback, from its end, where the error stands."""


def call(function: RewardFunction, request: ScoreRequest) -> Outcome:
    """Score one request; where the function gives a coroutine, it is run to its end."""
    started = time.perf_counter()
    try:
        result = function(**arguments_of(function, request))
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
        return outcome_of(result, request, started)
    except BaseException as error:  # a user's callable; sys.exit() inside it is its error too
        if isinstance(error, KeyboardInterrupt):
            raise
        return failure(error, time.perf_counter() - started)


async def call_async(function: RewardFunction, request: ScoreRequest, timeout: float) -> Outcome:
    """Score one request by an async function, cancelled after `timeout` seconds."""
    started = time.perf_counter()
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            return outcome_of(await function(**arguments_of(function, request)), request, started)
    except BaseException as error:  # a user's callable
        if isinstance(error, KeyboardInterrupt):
            raise
        seconds = time.perf_counter() - started
        if deadline.expired():
            return timed_out(timeout, seconds)
        return failure(error, seconds)


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


def arguments_of(function: RewardFunction, request: ScoreRequest) -> dict[str, Any]:
    """Return what a function is called with, by name."""
    arguments = {
        "data_source": request.data_source,
        "solution_str": request.solution_str,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
    }
    if takes(function, TOKENS):
        arguments[TOKENS] = list(request.response_ids)
    if takes(function, MESSAGES):
        arguments[MESSAGES] = list(request.messages)
    if takes(function, PROMPT):
        arguments[PROMPT] = request.prompt
    return arguments
