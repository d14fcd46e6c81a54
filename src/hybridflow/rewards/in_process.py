"""Scoring in this process (`reward.num_workers=0`): for debugging, and for rewards that cost next to nothing.

A sync function has no deadline here: one that hangs hangs the run, one that ends its process ends the run.
`breakpoint()` works. An async function keeps its deadline as long as it awaits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

from hybridflow.rewards.call import call, call_async
from hybridflow.rewards.load import is_async
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.table import RewardFunction

logger = logging.getLogger(__name__)

NUM_CONCURRENT = 32  # async calls under way at once


class InProcessScorer:
    """Calls the reward function here, one row after another (async ones NUM_CONCURRENT at a time)."""

    def __init__(self, function: RewardFunction, timeout: float) -> None:
        self._function = function
        self._timeout = timeout
        logger.info(
            "reward.num_workers=0: scoring in this process, where reward.timeout does not bound a function"
        )

    def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """The outcomes, in the order of the requests."""
        if not is_async(self._function):
            return [call(self._function, request) for request in requests]
        outcomes: list[Outcome] = []
        # a thread of its own: the caller may itself run inside an event loop, where asyncio.run is refused
        thread = threading.Thread(target=lambda: outcomes.extend(asyncio.run(self._score_async(requests))))
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
        """Nothing to end."""
