"""The interface of a tracker, the set of trackers that a run writes to, and a tracker whose library works
in its own thread, so that it can neither end a run nor slow it down.

    log, log_samples, close ──queue──► thread: the library is started, called in order, and closed

`metrics.jsonl` is written by the run itself, so whatever a library loses can be read there.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from hybridflow.config.trainer import PrometheusConfig
from hybridflow.errors import ConfigError, install_extra
from hybridflow.observability.advice import Advice, AdviceWatch, StallWatch

logger = logging.getLogger(__name__)
SampleRow = Mapping[str, Any]

Outcome = Literal["finished", "failed", "interrupted"]
"""How a run ended: at its end, by an error, or by a signal."""
START_SECONDS = 30.0
"""How long a run waits for a library to start; after that the library starts beside the run."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits until a library has sent what it holds."""
QUIET_SECONDS = 2.0
"""Seconds of a wait after which it is announced."""
MOST_WAITING = 1000
"""Calls that may wait for a library; later ones are left out, and counted."""


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run for its trackers.

    run_dir: the run folder, which exists
    project, experiment: names for grouping
    config: the resolved configuration, nested
    total_steps: the last step, for the time left; None where unknown
    resume_step: the step of the checkpoint this run resumes from; None for a fresh run
    earlier: metrics of the steps up to that one, by step
    wandb_proxy: address of the proxy through which wandb alone is reached; None: as its environment says
    alert_webhook: address that advice on the run is posted to; None: none
    prometheus: where Prometheus finds the metrics; None: nowhere
    """

    run_dir: Path
    project: str = "hybridflow"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    resume_step: int | None = None
    earlier: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    wandb_proxy: str | None = None
    alert_webhook: str | None = None
    prometheus: PrometheusConfig | None = None


class Tracker(ABC):
    """Takes the metrics of each step, in rising order of steps but for late ones; samples and closing are
    optional.
    """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def log_late(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step that came after those of later ones."""
        self.log(metrics, step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:  # noqa: B027  optional
        """Show validation samples (`prompt`, `response`, `score`, …), where the tracker can."""

    def alert(self, advice: Advice, step: int) -> None:  # noqa: B027  optional
        """Send advice on the run as an alert, where the tracker can."""

    def close(self, outcome: Outcome = "finished") -> None:  # noqa: B027  optional
        """Flush, record how the run ended, and let go."""


class Trackers(Tracker):
    """All trackers of a run as one, with advice on the run logged on the way.

    `earlier` has the metrics of the steps before a resume, by step, with which later ones are compared.
    `running` returns the seconds of each part of a step that is open; within the context of the trackers they
    are watched for stalls.
    """

    def __init__(
        self,
        trackers: Iterable[Tracker],
        earlier: Mapping[int, Mapping[str, float]] | None = None,
        running: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.trackers = list(trackers)
        self._step = 0
        self._watch = AdviceWatch()
        for step, metrics in sorted((earlier or {}).items()):
            self._watch.history.add(metrics, step)  # nothing is said about them
        self._stalls = StallWatch(running, lambda advice: self.alert(advice, self._step + 1))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            if step < self._step:
                tracker.log_late(metrics, step)
            else:
                tracker.log(metrics, step)
        self._step = max(step, self._step)
        self._stalls.finished(metrics)
        for advice in self._watch.look(metrics, step):
            self.alert(advice, step)

    def alert(self, advice: Advice, step: int) -> None:
        logger.warning("step %d: %s", step, advice)
        for tracker in self.trackers:
            tracker.alert(advice, step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for tracker in self.trackers:
            tracker.log_samples(rows, step)

    def close(self, outcome: Outcome = "finished") -> None:
        self._stalls.stop()
        with ExitStack() as stack:  # one that fails to close keeps none of the others open
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close, outcome)

    def __enter__(self) -> Trackers:
        self._stalls.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_outcome(kind))


def _outcome(kind: type[BaseException] | None) -> Outcome:
    if kind is None:
        return "finished"
    if issubclass(kind, KeyboardInterrupt):  # a signal that ends a run is one, too
        return "interrupted"
    return "failed"


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a tracker's library, or raise ConfigError naming the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger lists {extra!r}, but its library cannot be imported ({error}): "
            f"{install_extra(extra)}, or take {extra!r} out of trainer.logger"
        ) from error


class BackgroundTracker(Tracker):
    """Hands calls to the tracker that `build` makes; its failures are counted, and the first one is logged.

    Raises ConfigError if `build` does so, for example because a library is missing.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self.failures = 0
        """Calls that the library has not taken."""
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_WAITING)
        self._started = threading.Event()
        self._mistake: ConfigError | None = None
        self._outcome: Outcome = "finished"
        self._thread = threading.Thread(target=self._work, args=(build,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)
        if self._mistake is not None:
            self._calls.put(None)
            raise self._mistake

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = dict(metrics)
        self._put(lambda tracker: tracker.log(values, step))

    def log_late(self, metrics: Mapping[str, float], step: int) -> None:
        values = dict(metrics)
        self._put(lambda tracker: tracker.log_late(values, step))

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        kept = [dict(row) for row in rows]
        self._put(lambda tracker: tracker.log_samples(kept, step))

    def alert(self, advice: Advice, step: int) -> None:
        self._put(lambda tracker: tracker.alert(advice, step))

    def close(self, outcome: Outcome = "finished") -> None:
        self._outcome = outcome
        until = time.monotonic() + CLOSE_SECONDS
        try:
            self._calls.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            pass  # the library hangs, as the thread that is still alive says below
        else:
            self._thread.join(QUIET_SECONDS)
            if self._thread.is_alive():
                logger.info(
                    "waiting at most %.0f s until %s has sent what it holds", CLOSE_SECONDS, self.name
                )
                self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "%s had not ended after %.0f s and is left behind: what it has not sent is in metrics.jsonl",
                self.name,
                CLOSE_SECONDS,
            )
        if self.failures:
            logger.warning(
                "%s failed %d times in this run: metrics.jsonl has every step", self.name, self.failures
            )

    def _put(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed("it does not keep up")

    def _work(self, build: Callable[[], Tracker]) -> None:
        tracker: Tracker | None = None
        try:
            tracker = build()
        except ConfigError as error:  # after the wait has timed out, the first call raises it
            self._mistake = error
        except (Exception, SystemExit) as error:  # a library's own: the network, a change of its interface
            self._failed(f"{type(error).__name__}: {error}")
        finally:
            self._started.set()
        while (call := self._calls.get()) is not None:
            self._do(tracker, call)
        if tracker is not None:
            self._do(tracker, lambda each: each.close(self._outcome))

    def _do(self, tracker: Tracker | None, call: Callable[[Tracker], None]) -> None:
        if tracker is None:
            self._failed(str(self._mistake))
            return
        try:
            call(tracker)
        except (Exception, SystemExit) as error:  # as above
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning(
                "%s (trainer.logger) failed: %s. The run goes on, and metrics.jsonl has every step; further "
                "failures of %s are counted, and reported at the end",
                self.name,
                why,
                self.name,
            )
