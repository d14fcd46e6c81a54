"""The alarm of a part of a step that takes far longer than it did before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from hybridflow.observability.advice.history import Advice

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
