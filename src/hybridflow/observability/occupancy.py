"""Seconds that something spends in each of its states, of which it is in one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Occupancy:
    """Measures how long a thing is in which state; any thread may call the methods."""

    def __init__(self, state: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """`state` is the first one, from now on."""
        self._clock = clock
        self._lock = threading.Lock()
        self._state = state
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def be(self, state: str) -> str:
        """Be in `state` from now on; return the state before."""
        with self._lock:
            before = self._state
            self._count()
            self._state = state
        return before

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each state up to now, also of the one that goes on."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
        self._since = now
