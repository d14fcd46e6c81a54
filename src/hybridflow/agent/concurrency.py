"""How many trajectories run at once: more, step by step, while the engines keep up; else far fewer.

Additive increase, multiplicative decrease, as in TCP's congestion control (Chiu and Jain 1989), with its slow
start: until there was a crowd once, the number doubles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

LEAST = 8
"""Trajectories that run at once in any case."""
START = 64
INCREASE = 8
"""Trajectories more after each look at engines that keep up, once there was a crowd."""
DECREASE = 0.5
"""Share that is left after a look at engines that do not."""
LOOK_SECONDS = 1.0
CROWDED = 0.25
"""Share of the requests that may wait for room before fewer trajectories are let run."""


@dataclass
class Limit:
    """The number that was found out, kept from one step to the next."""

    value: int = START
    was_crowded: bool = False


class Concurrency:
    """At most `most` places for trajectories, and fewer where it `is_crowded`."""

    def __init__(self, limit: Limit, most: int, is_crowded: Callable[[], bool]) -> None:
        limit.value = min(most, limit.value)
        self.limit = limit
        self.peak = 0
        """Most trajectories that ran at once."""
        self._most = most
        self._is_crowded = is_crowded
        self._running = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it in this context."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running < self.limit.value)
            self._running += 1
            self.peak = max(self.peak, self._running)
        try:
            yield
        finally:
            self._running -= 1
            async with self._changed:
                self._changed.notify(1)

    async def adapt(self) -> None:
        """Look from time to time, for as long as nobody cancels this."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Set the limit by how crowded it is now; a decrease is waited for before the next one."""
        limit = self.limit
        if self._is_crowded():
            limit.was_crowded = True
            if self._running <= limit.value:
                limit.value = max(min(LEAST, self._most), int(limit.value * DECREASE))
        elif self._running >= limit.value:
            more = limit.value
            if limit.was_crowded:
                more = INCREASE
            limit.value = min(self._most, limit.value + more)
        async with self._changed:
            self._changed.notify_all()
