"""Timings: the seconds of named sections of a step, their begin and end, and the states of a resource.

with timer("step"): with timer("gen"): …  ──as_metrics──► {"timing_s/gen": …, "timing_s/step": …}
                         ├── progress: "generating"
                         └── timeline ──take, after each step──► TimelineTracker ──► timeline.jsonl

There is one `timeline` in a process, as there is one clock; the page of a run draws it as lanes. It costs
next to nothing where no tracker reads it. `Occupancy` counts the seconds that a resource, such as an engine,
spends in each of its states.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from hybridflow.observability.profiling import profiler

if TYPE_CHECKING:
    from hybridflow.observability.progress import Progress
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
        """Whether a tracker takes the spans."""

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
        """Keep what a trajectory has waited for, in a separate lane."""
        if self.active and self._trajectories < MOST_TRAJECTORIES:
            self._trajectories += 1
            for span in spans:
                self.add(f"trajectory {number}", span.name, span.start, span.end)

    @contextmanager
    def section(self, name: str, role: str | None = None) -> Iterator[None]:
        """Keep the time of this context as a section of a step, in the lane of its role, or of `role`."""
        if not self.active:
            yield
            return
        start = time.time()
        try:
            yield
        finally:
            self.add(role or ROLES.get(name, DRIVER), name, start, time.time())

    def take(self) -> list[TimeSpan]:
        """Return the spans that were added since the last time."""
        with self._lock:
            spans = self._spans
            self._spans = []
            self._trajectories = 0
        return spans


timeline = Timeline()
"""What this process has spent its time on."""


WORDS = {
    "gen": "generating",
    "reward": "scoring",
    "wait_for_rollouts": "waiting for rollouts",
    "old_log_prob": "computing log-probs",
    "ref": "computing log-probs of the reference",
    "teacher": "computing log-probs of the teacher",
    "values": "computing values",
    "process_reward": "scoring tokens",
    "adv": "computing advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "update": "updating the model",
    "update_weights": "passing the weights on",
    "testing": "validating",
    "testing_in_background": "validating beside training",
    "val_gen": "generating",
    "val_reward": "scoring",
    "save_checkpoint": "saving a checkpoint",
}
"""The display names of sections; one that is not here is not reported."""


class Timer:
    """Wall-clock seconds by section; sections nest, repeat (times add up) and keep their time when an
    exception leaves them. With `progress`, each section is a phase of it; with `role`, all are in the lane of
    that role.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        progress: Progress | None = None,
        role: str | None = None,
    ) -> None:
        self._clock = clock
        self._progress = progress
        self._role = role
        self._seconds: dict[str, float] = {}
        self._open: dict[str, int] = {}
        self._since: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        self._open[name] = self._open.get(name, 0) + 1
        if self._open[name] == 1:
            self._since[name] = start
        reported: AbstractContextManager[object] = nullcontext()
        if self._progress is not None and name in WORDS:
            reported = self._progress.phase(WORDS[name])
        try:
            with reported, profiler.span(name), timeline.section(name, self._role):
                yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:  # a section inside itself counts once
                del self._since[name]
                self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def seconds(self, name: str) -> float:
        """Seconds of a finished section, 0 where it never ran."""
        return self._seconds.get(name, 0.0)

    def running(self) -> dict[str, float]:
        """Return the seconds that each open section has taken so far; any thread may ask."""
        now = self._clock()
        return {name: now - since for name, since in dict(self._since).items()}

    def as_metrics(self, prefix: str = "timing_s") -> dict[str, float]:
        """`{prefix}/{section}` to seconds for every finished section."""
        return {f"{prefix}/{name}": seconds for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Forget the finished sections, before the next step."""
        self._seconds.clear()


class Occupancy:
    """Measures how long a resource is in each state; any thread may call the methods."""

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
        """Return the seconds in each state up to now, also of the present one."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
        self._since = now
