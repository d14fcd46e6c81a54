"""When the parts of a run began and ended, which the page of a run draws as lanes.

Timer sections, trajectories ──add──► timeline ──take, after each step──► TimelineTracker ──► timeline.jsonl

There is one `timeline` in a process, as there is one clock. It costs next to nothing where nobody takes what
it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.protocol.spans import TraceSpan

TimeSpan = tuple[str, str, float, float]
"""Lane, name, start and end; times in seconds since the epoch."""

MOST_SPANS = 4000
"""Spans that wait to be taken; later ones are left out."""
MOST_TRAJECTORIES = 48
"""Trajectories of a step whose spans are kept, the first ones."""
DRIVER = "driver"
"""Lane of what the trainer's own process computes."""
ROLES = {
    "gen": "rollout",
    "val_gen": "rollout",
    "old_log_prob": "actor",
    "update_actor": "actor",
    "update": "actor",
    "update_weights": "actor",
    "save_checkpoint": "actor",
    "ref": "reference",
    "teacher": "teacher",
    "values": "critic",
    "update_critic": "critic",
    "process_reward": "process_reward",
}
"""Role on whose devices a section runs; other sections run in the trainer's own process."""


class Timeline:
    """Keeps spans between `start` and `stop`; any thread may add them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[TimeSpan] = []
        self._trajectories = 0
        self.active = False
        """Whether somebody takes the spans."""

    def start(self) -> None:
        """Begin to keep spans."""
        self.take()
        self.active = True

    def stop(self) -> None:
        """Keep none any more."""
        self.active = False
        self.take()

    def add(self, lane: str, name: str, start: float, end: float) -> None:
        """Keep a span that has ended, in seconds since the epoch."""
        with self._lock:
            if self.active and len(self._spans) < MOST_SPANS:
                self._spans.append((lane, name, round(start, 4), round(end, 4)))

    def add_trajectory(self, number: int, spans: Iterable[TraceSpan]) -> None:
        """Keep what a trajectory has waited for, in a lane of its own."""
        if self.active and self._trajectories < MOST_TRAJECTORIES:
            self._trajectories += 1
            for span in spans:
                self.add(f"trajectory {number}", span.name, span.start, span.end)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Keep the time of this context as a section of a step, in the lane of its role."""
        if not self.active:
            yield
            return
        start = time.time()
        try:
            yield
        finally:
            self.add(ROLES.get(name, DRIVER), name, start, time.time())

    def take(self) -> list[TimeSpan]:
        """Return the spans that were added since the last time."""
        with self._lock:
            spans = self._spans
            self._spans = []
            self._trajectories = 0
        return spans


timeline = Timeline()
"""What this process has spent its time on."""
