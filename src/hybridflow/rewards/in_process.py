"""Scoring in this process (`reward.num_workers=0`): for debugging, and for rewards that cost next to nothing.

A sync function has no deadline here, so one that hangs hangs the run. `breakpoint()` works. An async function
keeps its deadline as long as it awaits. `os._exit` in a function is an error of that sample: `os._exit(0)`
would end a run in the middle with status 0, which a scheduler takes for success.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from hybridflow.errors import RewardError
from hybridflow.rewards.call import call, call_async
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.request import OpenScoring, Outcome, ScoreRequest

logger = logging.getLogger(__name__)

NUM_CONCURRENT = 32
"""Async calls under way at once."""


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

    def outcomes(self) -> list[Outcome]:
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

    async def _score_async(self) -> list[Outcome]:
        slots = asyncio.Semaphore(NUM_CONCURRENT)

        async def one(request: ScoreRequest) -> Outcome:
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
        """Put back what stood there before."""
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
