"""One call of a reward function, or of a manager: Outcomes come out, never an exception, whatever it does.

A manager scores all responses of a step in one call (`reward.manager`):

    rows, each with what a reward function is called with ──manager──► results, one for each row

A worker process (`processes/hosts.py`) loads the reward function once and calls it often. A request comes as
its pickle, so that one that cannot be read is that row's error. Outcomes hold plain values only
(`result.py`), so what the driver reads of them runs no code.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from hybridflow.config.reward import RewardConfig
from hybridflow.data.plugin import awaited, load_function
from hybridflow.errors import HybridFlowError, RewardError
from hybridflow.processes.errors import CallRaised
from hybridflow.rewards.compose import BATCH, resolve
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.result import ScoreRequest, ScoringOutcome, normalize_result, token_scores_of
from hybridflow.sandbox.own_limits import OwnLimits

Manager = Callable[[list[dict[str, Any]]], Any]
Mode = Literal["sync", "async", "batch"]
MAX_ANSWER = 60 << 20
"""Longest pickle of an outcome in bytes; `processes/channel.py` refuses a little more."""
MAX_PROCESSES = 256
"""Processes that a function may have started at once, those of the sandbox among them."""
MAX_OUTPUT_KB = 1024
"""KiB that a call may print; what is beyond is dropped."""
POLL_SECONDS = 0.05
"""Seconds after which `poll` returns also where no request is done, so that new ones can join."""


def call(function: RewardFunction, request: ScoreRequest) -> ScoringOutcome:
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


async def call_async(function: RewardFunction, request: ScoreRequest, timeout: float) -> ScoringOutcome:
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
        return ScoringOutcome(error="timeout", detail=detail, seconds=seconds)


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
) -> list[ScoringOutcome]:
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


def failure(error: BaseException, seconds: float) -> ScoringOutcome:
    """Return the outcome of a sample whose function raised; errors that are not ours keep their traceback."""
    if isinstance(error, HybridFlowError):
        detail = str(error)
    else:
        detail = CallRaised.by(error).traceback_text
    return ScoringOutcome(error=type(error).__name__, detail=detail, seconds=seconds)


def outcome_of(result: Any, request: ScoreRequest, started: float) -> ScoringOutcome:
    """Return the outcome of a result. Raises RewardError if it is none that a reward function may return."""
    token_scores = token_scores_of(result, len(request.response_ids))
    if token_scores:
        whole = {}
        if isinstance(result, Mapping):
            whole = dict(result)
        result = {**whole, "score": math.fsum(token_scores)}
    score, extras = normalize_result(result)
    return ScoringOutcome(score, extras, seconds=time.perf_counter() - started, token_scores=token_scores)


class LoadedReward:
    """The reward function that (RewardConfig, seed, JudgeAccess or None) choose; it travels as their pickle,
    `setup`.

    Raises what `resolve` raises.
    """

    def __init__(self, setup: bytes) -> None:
        config, seed, judge = pickle.loads(setup)
        self._setup = setup
        self._timeout: float = config.timeout
        self._function = resolve(config, seed, judge)
        self._manager = load_manager(config, self._function)
        # from here on, so that what the file imports is not counted
        self._limits: OwnLimits | None = None
        if config.memory_limit_mb is not None:
            self._limits = OwnLimits(
                memory_mb=config.memory_limit_mb, processes=MAX_PROCESSES, output_kb=MAX_OUTPUT_KB
            )
        self._tasks: dict[int, asyncio.Task[ScoringOutcome]] = {}

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return load, (self._setup,)

    def mode(self) -> Mode:
        """Return how requests are scored: one by one, many at once, or all in one call."""
        if self._manager is not None:
            return "batch"
        if self._function.is_async:
            return "async"
        return "sync"

    def score(self, payloads: Sequence[bytes]) -> list[ScoringOutcome] | Awaitable[list[ScoringOutcome]]:
        """Score one request, or have the manager score all, and no other beside them."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        if self.mode() == "async":
            return self._score_all_async(payloads)
        requests = [self._begun(payload) for payload in payloads]
        readable = [request for request in requests if isinstance(request, ScoreRequest)]
        if self._manager is not None:
            scored = iter(call_manager(self._manager, self._function, readable))
        else:
            scored = iter([call(self._function, request) for request in readable])
        return [
            request if isinstance(request, ScoringOutcome) else _bounded(next(scored)) for request in requests
        ]

    async def poll(self, new: Mapping[int, bytes], known: Sequence[int]) -> dict[int, ScoringOutcome]:
        """Start new requests; return the outcomes, by ticket, that are ready after a short wait.

        `known` has all tickets, at least one; other requests are cancelled. Raises LookupError if a process
        that has ended had some of them.
        """
        if lost := set(known) - set(new) - set(self._tasks):
            raise LookupError(f"{len(lost)} requests were in a process that has ended")
        for ticket in set(self._tasks) - set(known):
            self._tasks.pop(ticket).cancel()
        for ticket, payload in new.items():
            self._tasks[ticket] = asyncio.create_task(self._score_async(payload))
        await asyncio.wait(self._tasks.values(), timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        done = [ticket for ticket, task in self._tasks.items() if task.done()]
        return {ticket: self._tasks.pop(ticket).result() for ticket in done}

    async def _score_all_async(self, payloads: Sequence[bytes]) -> list[ScoringOutcome]:
        return [await self._score_async(payload) for payload in payloads]

    async def _score_async(self, payload: bytes) -> ScoringOutcome:
        request = self._begun(payload)
        if isinstance(request, ScoringOutcome):
            return request
        return _bounded(await call_async(self._function, request, self._timeout))

    def _begun(self, payload: bytes) -> ScoreRequest | ScoringOutcome:
        """Return the request, or the error of one that this process cannot read."""
        if self._limits is not None:
            self._limits.allow_output()
        try:
            request: ScoreRequest | ScoringOutcome = pickle.loads(payload)
        except Exception as error:  # a ground truth of a class that this process cannot import
            return failure(error, 0.0)
        return request


@functools.cache
def load(setup: bytes) -> LoadedReward:
    """Load the function that a process does not have yet."""
    return LoadedReward(setup)


def _bounded(outcome: ScoringOutcome) -> ScoringOutcome:
    """Return the outcome, or the error of one that is too large to be sent."""
    length = len(pickle.dumps(outcome))
    if length <= MAX_ANSWER:
        return outcome
    sizes = {name: len(pickle.dumps(value)) for name, value in outcome.extras.items()}
    largest = max(sizes, key=sizes.__getitem__, default="score")
    detail = (
        f"the reward function returned {length:,} bytes of values, most of them under {largest!r}; wanted at "
        f"most {MAX_ANSWER:,}: return less"
    )
    return ScoringOutcome(error="RewardError", detail=detail, seconds=outcome.seconds)
