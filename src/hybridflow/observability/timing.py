"""Seconds spent in the named sections of a step, which are also what a run reports that it is doing.

with timer("step"): with timer("gen"): …  ──as_metrics──► {"timing_s/gen": …, "timing_s/step": …}
                         ├── progress: "generating"
                         └── timeline: from when to when
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hybridflow.observability.profiling import profiler
from hybridflow.observability.progress import Progress
from hybridflow.observability.timeline import timeline

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
    "val_gen": "generating",
    "val_reward": "scoring",
    "save_checkpoint": "saving a checkpoint",
}
"""What a section is called in front of people; one that is not here is not reported."""


class Timer:
    """Wall-clock seconds by section; sections nest, repeat (times add up) and keep their time when an
    exception leaves them. With `progress`, each section is a phase of it.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, progress: Progress | None = None
    ) -> None:
        self._clock = clock
        self._progress = progress
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
            with reported, profiler.span(name), timeline.section(name):
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
