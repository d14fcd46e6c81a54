"""The watch that lets all rules look at each step, and repeats their advice rarely."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.observability.advice.alarms import ALARMS
from hybridflow.observability.advice.hints import HINTS
from hybridflow.observability.advice.history import Advice, History

REPEAT_EVERY = 20
"""Steps after which the advice of a rule that stays broken is given again."""


def find_advice(history: History) -> tuple[list[Advice], list[Advice]]:
    """Return the alarms that hold now, and the hints: none where there is an alarm."""
    alarms = [advice for rule in ALARMS if (advice := rule(history))]
    if alarms:
        return alarms, []
    return [], [advice for rule in HINTS if (advice := rule(history))]


class AdviceWatch:
    """Watches one run, step by step."""

    def __init__(self, repeat_every: int = REPEAT_EVERY) -> None:
        self.history = History()
        self._repeat_every = repeat_every
        self._said: dict[str, int] = {}

    def add_earlier(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step before a resume, and say nothing about it."""
        self.history.add(metrics)

    def look(self, metrics: Mapping[str, float], step: int) -> list[Advice]:
        """Return what is due to be said after this step: alarms, or hints where there is no alarm."""
        self.history.add(metrics)
        alarms, hints = find_advice(self.history)
        due = []
        for advice in alarms or hints:
            if advice.rule not in self._said or step - self._said[advice.rule] >= self._repeat_every:
                self._said[advice.rule] = step
                due.append(advice)
        return due
