"""The metrics of a run so far, as rules look at them, and what a rule says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

FIRST_STEPS = 10
"""Steps whose median stands for the beginning of a run."""
RECENT_STEPS = 5
"""Steps whose median stands for now, so that one odd step breaks no rule of change."""
HELD_OUT = "val-core/"
_KEPT_VALIDATIONS = 20


@dataclass(frozen=True)
class Advice:
    """A finding of a rule about a run."""

    rule: str
    """Name of the rule."""
    message: str
    """The number that shows it, and what it means."""
    keys: tuple[str, ...]
    """Keys of the configuration that change it, the most likely one first; none where only the user's own
    data or code can.
    """

    def __str__(self) -> str:
        if not self.keys:
            return self.message
        return f"{self.message} (keys: {', '.join(self.keys)})"


class History:
    """First and recent values of each metric. Only steps count that have the metric."""

    def __init__(self) -> None:
        self.now: Mapping[str, float] = {}
        """The metrics of the newest step."""
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._validations: deque[tuple[Mapping[str, float], float | None]] = deque(maxlen=_KEPT_VALIDATIONS)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of the next step."""
        self.now = metrics
        for name, value in metrics.items():
            first = self._first.setdefault(name, [])
            if len(first) < FIRST_STEPS:
                first.append(value)
            self._recent.setdefault(name, deque(maxlen=RECENT_STEPS)).append(value)
        held_out = {name: metrics[name] for name in metrics if name.startswith(HELD_OUT) and "/mean@" in name}
        if held_out:
            self._validations.append((held_out, self.recent("critic/score/mean")))

    def first(self, name: str) -> float | None:
        """Return the median of the first steps, or None while the run has not left them behind."""
        first = self._first.get(name, [])
        if len(first) < FIRST_STEPS:
            return None
        return median(first)

    def recent(self, name: str) -> float | None:
        """Return the median of the last steps, or None before there are enough."""
        recent = self._recent.get(name, ())
        if len(recent) < RECENT_STEPS:
            return None
        return median(recent)

    def change(self, name: str) -> tuple[float, float] | None:
        """Return the medians of the first and of the last steps, or None where one is missing."""
        first = self.first(name)
        recent = self.recent(name)
        if first is None or recent is None:
            return None
        return first, recent

    def validations(self) -> Iterable[tuple[Mapping[str, float], float | None]]:
        """Return the held-out scores of the last validations, each with the training score of its time."""
        return tuple(self._validations)

    def total(self, prefix: str) -> float:
        """Return the sum of the newest step's metrics whose names begin with `prefix`."""
        return sum(value for name, value in self.now.items() if name.startswith(prefix))


Rule = Callable[[History], Advice | None]
"""Looks at a run, and says what it finds."""
