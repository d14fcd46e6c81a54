"""Shares of the time in which the trainer waited for rollouts, and the engines for something to do.

    waits of the trainer's thread ──┐
    seconds of busy engines ────────┴──taken()──► fully_async/trainer/idle_ratio, fully_async/rollouter/…

All shares are of one span, from one call of `taken` to the next. Where training and generation share a
process, either is idle while the other one works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from hybridflow.observability.occupancy import Occupancy

EnginesIn = Callable[[Literal["busy", "standing"]], float]
"""Returns the seconds since the start in which the engines, on the mean, were in this state."""


class IdleShares:
    """Measures from the first wait on; `waiting` is for the trainer's thread."""

    def __init__(self, engines_in: EnginesIn, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engines_in = engines_in
        self._clock = clock
        self._trainer: Occupancy | None = None
        self._before = (0.0, 0.0, 0.0, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what is done in this context as a wait for rollouts."""
        if self._trainer is None:
            self._trainer = Occupancy("working", self._clock)
            self._before = self._measured(self._trainer)
        before = self._trainer.be("waiting")
        try:
            yield
        finally:
            self._trainer.be(before)

    def taken(self) -> dict[str, float]:
        """Return the shares since the last call; none where no time has passed."""
        if self._trainer is None:
            return {}
        now = self._measured(self._trainer)
        span, waited, busy, stood = (new - old for new, old in zip(now, self._before))
        self._before = now
        if span <= 0.0:
            return {}
        return {
            "fully_async/trainer/idle_ratio": waited / span,
            "fully_async/rollouter/idle_ratio": 1.0 - busy / span,
            "fully_async/rollouter/standing_ratio": stood / span,
        }

    def _measured(self, trainer: Occupancy) -> tuple[float, float, float, float]:
        seconds = trainer.seconds()
        return (
            sum(seconds.values()),
            seconds.get("waiting", 0.0),
            self._engines_in("busy"),
            self._engines_in("standing"),
        )
