"""Seconds spent in the named sections of a step.

with timer("step"): with timer("gen"): …  ──as_metrics──► {"timing_s/gen": …, "timing_s/step": …}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Wall-clock seconds by section; sections nest, repeat (times add up) and keep their time when an
    exception leaves them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        self._open[name] = self._open.get(name, 0) + 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:  # a section inside itself counts once
                self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def seconds(self, name: str) -> float:
        """Seconds of a finished section, 0 where it never ran."""
        return self._seconds.get(name, 0.0)

    def as_metrics(self, prefix: str = "timing_s") -> dict[str, float]:
        """`{prefix}/{section}` to seconds for every finished section."""
        return {f"{prefix}/{name}": seconds for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Forget the finished sections, before the next step."""
        self._seconds.clear()
