"""Limits of a reward that is a service: requests at once, and requests and tokens a minute."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from hybridflow.config.reward import RewardConfig

UNLIMITED = 1 << 30


class RateLimit:
    """Lets requests through in the order in which they come, evenly spaced so that no minute has too many.

    A request counts as `reward.estimated_tokens_per_request` tokens.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        requests_s = 60.0 / (config.max_rpm or float("inf"))
        tokens_s = 60.0 * config.estimated_tokens_per_request / (config.max_tpm or float("inf"))
        self._spacing_s = max(requests_s, tokens_s)
        self._places = asyncio.Semaphore(config.max_concurrent or UNLIMITED)
        self._turn = asyncio.Lock()
        self._next = now()
        self._now = now
        self._sleep = sleep

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait until a request may be made; it holds one of the places for those at once until the end."""
        async with self._places:
            async with self._turn:
                wait = self._next - self._now()
                if wait > 0:
                    await self._sleep(wait)
                self._next = max(self._next, self._now()) + self._spacing_s
            yield
