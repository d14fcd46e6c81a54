"""Watches: all rules look at each step, and the parts of a step may not take far longer than before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

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


STALLED = 6.0
"""Times its median that a part of a step may take."""
LEAST_SECONDS = 30.0
"""A part that has taken less is no stall, however short it was before."""
LEAST_STEPS = 3
_POLL_SECONDS = 5.0
_KEPT_STEPS = 50

KEYS = {
    "gen": ("actor_rollout_ref.rollout.agent.deadline", "trainer.worker_timeout"),
    "wait_for_rollouts": ("actor_rollout_ref.rollout.agent.deadline", "trainer.worker_timeout"),
    "reward": ("reward.timeout", "reward.num_workers"),
    "save_checkpoint": ("actor_rollout_ref.actor.checkpoint.async_save",),
}
"""Keys by section; the others are calls of the workers."""


class StallWatch:
    """Compares the open parts of a step with what they took in earlier steps, in a thread of its own.

    `running` returns the seconds that each open part has taken so far; `say` is told of a stall, once for
    each time that the part is open.
    """

    def __init__(self, running: Callable[[], Mapping[str, float]], say: Callable[[Advice], None]) -> None:
        self._running = running
        self._say = say
        self._seconds: dict[str, deque[float]] = {}
        self._said: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def finished(self, metrics: Mapping[str, float]) -> None:
        """Take the times of a step that has ended, from its metrics `timing_s/…`."""
        for name, seconds in metrics.items():
            if name.startswith("timing_s/"):
                section = name.removeprefix("timing_s/")
                self._seconds.setdefault(section, deque(maxlen=_KEPT_STEPS)).append(seconds)

    def check(self) -> None:
        """Look at the open parts once."""
        running = self._running()
        self._said &= set(running)
        for section, seconds in running.items():
            before = list(self._seconds.get(section, ()))
            if section in self._said or section == "step" or len(before) < LEAST_STEPS:
                continue
            usual = median(before)
            if seconds > max(STALLED * usual, LEAST_SECONDS):
                self._said.add(section)
                self._say(
                    Advice(
                        "stall",
                        f"timing_s/{section} has taken {seconds:.0f} s so far, and {usual:.1f} s in the "
                        "steps before: something may hang",
                        KEYS.get(section, ("trainer.worker_timeout",)),
                    )
                )

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self.check()
