"""From the `reward.*` keys to a RewardManager, which may keep outcomes: an equal request is not scored again.

add(request) ─► known? ─► its outcome            else ─► scorer ─► outcome, kept unless it is an error

The reward function is loaded here, so a wrong one shows before a model is allocated.

Scoring may be in this process (`reward.num_workers=0`): for debugging, and for rewards that cost next to
nothing. A sync function has no deadline here, so one that hangs hangs the run. `breakpoint()` works. An async
function keeps its deadline as long as it awaits. `os._exit` in a function is an error of that sample:
`os._exit(0)` would end a run in the middle with status 0, which a scheduler takes for success.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NoReturn

from hybridflow.config.reward import RewardConfig
from hybridflow.config.source_code import in_memory
from hybridflow.errors import RewardError
from hybridflow.rewards.call import call, call_async
from hybridflow.rewards.compose import describe, resolve
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.load import JudgeAccess
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.result import OpenScoring, Scorer, ScoreRequest, ScoringOutcome

logger = logging.getLogger(__name__)
NUM_CONCURRENT = 32
"""Async calls that run at once."""


class CachedScorer:
    """Keeps the newest `size` outcomes of one reward function, for as long as the run's process lives. Any
    thread may ask: validation has one of its own beside training.

    Requests are equal where all is equal that the function is given, so its prompt's row as well.
    """

    def __init__(self, scorer: Scorer, size: int) -> None:
        self._scorer = scorer
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, ScoringOutcome] = OrderedDict()

    def open(self) -> OpenScoring:
        return _CachedScoring(self._scorer.open(), self)

    def close(self) -> None:
        self._scorer.close()

    def find(self, key: bytes) -> ScoringOutcome | None:
        """Return a kept outcome, which now is the newest one."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: bytes, outcome: ScoringOutcome) -> None:
        """Keep an outcome, and forget the oldest one where there are too many."""
        if outcome.error:
            return
        with self._lock:
            self._kept[key] = replace(outcome, seconds=0.0, tries=0)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)


class _CachedScoring:
    def __init__(self, inner: OpenScoring, cache: CachedScorer) -> None:
        self._inner = inner
        self._cache = cache
        self._keys: list[bytes] = []
        """Of each request."""
        self._begun: dict[bytes, None] = {}
        """Keys of the requests that the scorer has."""
        self._known: dict[bytes, ScoringOutcome] = {}

    def add(self, request: ScoreRequest) -> None:
        try:
            payload = pickle.dumps(request)
        except Exception:  # whatever the rows of a dataset hold: such a row equals no other, of no step
            payload = os.urandom(16)
        key = hashlib.blake2b(payload, digest_size=16).digest()
        if key not in self._known and key not in self._begun:
            if found := self._cache.find(key):
                self._known[key] = found
            else:
                self._begun[key] = None
                self._inner.add(request)
        self._keys.append(key)

    def outcomes(self) -> list[ScoringOutcome]:
        scored = dict(zip(self._begun, self._inner.outcomes(), strict=True))
        for key, outcome in scored.items():
            self._cache.keep(key, outcome)
        outcomes = []
        for key in self._keys:
            outcomes.append(self._known.get(key) or scored[key])
            self._known[key] = replace(outcomes[-1], seconds=0.0, tries=0)
        return outcomes

    def close(self) -> None:
        self._inner.close()


def build_reward_manager(config: RewardConfig, seed: int, judge: JudgeAccess | None = None) -> RewardManager:
    """Load the reward function that the configuration chooses and start the processes that call it; `judge`
    is the run's generative reward model, which functions may ask.

    Raises ConfigError if it cannot be found, imported or called as reward functions are, RewardError if a
    built-in one needs an extra that is not installed or a worker does not start.
    """
    scorer: Scorer
    if config.num_workers > 0:
        from hybridflow.rewards.pool import RewardPool

        scorer = RewardPool(config, seed, judge)
    else:
        scorer = InProcessScorer(partial(resolve, config, seed, judge), config.timeout)
    if config.cache_size:
        scorer = CachedScorer(scorer, config.cache_size)
    names = [config.function, *(str(term.get("name")) for term in config.terms)]
    return RewardManager(
        scorer,
        on_error=config.on_error,
        function=describe(config),
        has_file=not any(map(in_memory, names)),
    )


class InProcessScorer:
    """Calls the reward function here, one row after another (async ones NUM_CONCURRENT at a time).

    `os._exit` is guarded from the time that the function is loaded, so that `from os import _exit` in its
    file gets the guarded one, too; what `load` raises passes through.
    """

    def __init__(self, load: Callable[[], RewardFunction], timeout: float) -> None:
        self.timeout = timeout
        self.guard = ExitGuard()
        try:
            with self.guard.scoring():
                self.function = load()
        except BaseException:
            self.guard.remove()
            raise
        logger.info("reward.num_workers=0: scoring in this process, where reward.timeout has no effect")

    def open(self) -> OpenScoring:
        """Return where requests are collected; they are scored when the outcomes are wanted."""
        return _Collected(self)

    def close(self) -> None:
        """Put back `os._exit`; no process is to be ended."""
        self.guard.remove()


class _Collected:
    """Requests that wait until all have come: in this process nothing could be scored beside generation."""

    def __init__(self, scorer: InProcessScorer) -> None:
        self._scorer = scorer
        self._requests: list[ScoreRequest] = []

    def add(self, request: ScoreRequest) -> None:
        self._requests.append(request)

    def outcomes(self) -> list[ScoringOutcome]:
        scorer = self._scorer
        if scorer.function.is_async:
            # in a thread: the caller may itself run inside an event loop, where asyncio.run is refused
            thread = ThreadPoolExecutor(1)
            try:
                return thread.submit(asyncio.run, self._score_async()).result()
            finally:
                thread.shutdown(wait=False)  # a signal does not wait for the rows that are being scored
        with scorer.guard.scoring():
            return [call(scorer.function, request) for request in self._requests]

    async def _score_async(self) -> list[ScoringOutcome]:
        slots = asyncio.Semaphore(NUM_CONCURRENT)

        async def one(request: ScoreRequest) -> ScoringOutcome:
            async with slots:
                return await call_async(self._scorer.function, request, self._scorer.timeout)

        with self._scorer.guard.scoring():
            return await asyncio.gather(*map(one, self._requests))

    def close(self) -> None:
        self._requests.clear()


class ExitGuard:
    """Replaces `os._exit` until `remove`.

    In a thread inside `scoring` a call raises RewardError. In another thread, while some thread is inside, a
    call with status 0 ends the process with status 1 and a message. Elsewhere, and in forks, it is the real
    one.
    """

    def __init__(self) -> None:
        self._scoring: list[int] = []
        self._real = os._exit
        self._process = os.getpid()
        os._exit = self._guarded

    def remove(self) -> None:
        """Restore the original."""
        if os._exit == self._guarded:
            os._exit = self._real

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """A reward function runs in this thread."""
        thread = threading.get_ident()
        self._scoring.append(thread)
        try:
            yield
        finally:
            self._scoring.remove(thread)

    def _guarded(self, status: int) -> NoReturn:
        if os.getpid() == self._process and self._scoring:
            if threading.get_ident() in self._scoring:
                raise RewardError(
                    f"the reward function called os._exit({status}), which would have ended the run: with "
                    "reward.num_workers=0 it runs in the run's own process; return a score, or raise an error"
                )
            if status == 0:
                sys.stderr.write(
                    "os._exit(0) was called in a thread while the reward function ran "
                    "(reward.num_workers=0): the run ends with status 1, because it is not finished\n"
                )
                sys.stderr.flush()
                status = 1
        self._real(status)
