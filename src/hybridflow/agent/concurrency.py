"""How many trajectories run at once: more, step by step, while the engines keep up; else far fewer.

Additive increase, multiplicative decrease, as in TCP's congestion control (Chiu and Jain 1989), with its slow
start: until the engines were crowded once, the number doubles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LEAST = 8
"""Trajectories that run at once in any case."""
START = 64
INCREASE = 8
"""Trajectories more after each look at engines that keep up, once they have been crowded."""
DECREASE = 0.5
"""Share that is left after a look at engines that do not."""
LOOK_SECONDS = 1.0
CROWDED = 0.25
"""Share of the requests in engines that may wait for room before fewer trajectories are let run."""


class Concurrency:
    """Places for trajectories; `waiting` says how many of the requests in the engines wait for room, and how
    many there are.
    """

    def __init__(self, most: int, waiting: Callable[[], tuple[int, int]]) -> None:
        self.limit = min(most, START)
        self.peak = 0
        """Most trajectories that ran at once."""
        self._most = most
        self._waiting = waiting
        self._running = 0
        self._were_crowded = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it in this context."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running < self.limit)
            self._running += 1
            self.peak = max(self.peak, self._running)
        try:
            yield
        finally:
            self._running -= 1
            async with self._changed:
                self._changed.notify(1)

    async def adapt(self) -> None:
        """Look at the engines from time to time, for as long as nobody cancels this."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Set the limit by how crowded the engines are now."""
        waiting, requests = self._waiting()
        if requests and waiting > CROWDED * requests:
            self._were_crowded = True
            self.limit = max(min(LEAST, self._most), int(self.limit * DECREASE))
        elif self._running >= self.limit:
            more = self.limit
            if self._were_crowded:
                more = INCREASE
            self.limit = min(self._most, self.limit + more)
        async with self._changed:
            self._changed.notify_all()
