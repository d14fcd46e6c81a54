"""Scoring in this process (`reward.num_workers=0`): for debugging, and for rewards that cost next to nothing.

A sync function has no deadline here, so one that hangs hangs the run; `os._exit` in it is an error of that
sample (`exit_guard.py`). `breakpoint()` works. An async function keeps its deadline as long as it awaits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from hybridflow.rewards.call import call, call_async
from hybridflow.rewards.exit_guard import ExitGuard
from hybridflow.rewards.load import is_async
from hybridflow.rewards.request import OpenScoring, Outcome, ScoreRequest
from hybridflow.rewards.table import RewardFunction

logger = logging.getLogger(__name__)

NUM_CONCURRENT = 32
"""Async calls under way at once."""


class InProcessScorer:
    """Calls the reward function here, one row after another (async ones NUM_CONCURRENT at a time).

    `os._exit` is guarded from the time that the function is loaded; what `load` raises passes through.
    """

    def __init__(self, load: Callable[[], RewardFunction], timeout: float) -> None:
        self._timeout = timeout
        self._guard = ExitGuard()
        self._guard.install()
        try:
            with self._guard.scoring():
                self._function = load()
        except BaseException:
            self._guard.remove()
            raise
        logger.info("reward.num_workers=0: scoring in this process, where reward.timeout has no effect")

    def open(self) -> OpenScoring:
        """Return where requests are collected; they are scored when the outcomes are wanted."""
        return _Collected(self)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """The outcomes, in the order of the requests."""
        if not is_async(self._function):
            with self._guard.scoring():
                return [call(self._function, request) for request in requests]
        outcomes: list[Outcome] = []

        def run() -> None:
            with self._guard.scoring():
                outcomes.extend(asyncio.run(self._score_async(requests)))

        # a thread of its own: the caller may itself run inside an event loop, where asyncio.run is refused
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(outcomes) == len(requests), f"{len(requests)} requests, {len(outcomes)} outcomes"
        return outcomes

    async def _score_async(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        slots = asyncio.Semaphore(NUM_CONCURRENT)

        async def one(request: ScoreRequest) -> Outcome:
            async with slots:
                return await call_async(self._function, request, self._timeout)

        return await asyncio.gather(*(one(request) for request in requests))

    def close(self) -> None:
        """Put back `os._exit`; no process is to be ended."""
        self._guard.remove()


class _Collected:
    """Requests that wait until all have come: in this process nothing could be scored beside generation."""

    def __init__(self, scorer: InProcessScorer) -> None:
        self._scorer = scorer
        self._requests: list[ScoreRequest] = []

    def add(self, request: ScoreRequest) -> None:
        self._requests.append(request)

    def outcomes(self) -> list[Outcome]:
        return self._scorer.score(self._requests)

    def close(self) -> None:
        self._requests.clear()
