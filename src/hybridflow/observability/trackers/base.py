"""The interface of a tracker, and the set of trackers that a run writes to."""

from __future__ import annotations

import importlib
import logging
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


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run for its trackers.

    run_dir: the run folder, which exists
    project, experiment: names for grouping
    config: the resolved configuration, nested
    total_steps: the last step, for the time left; None where unknown
    resume_step: the step of the checkpoint this run goes on from; None for a fresh run
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
    """Takes the metrics of each step, in rising order of steps; samples and closing are optional."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:  # noqa: B027  optional
        """Show validation samples (`prompt`, `response`, `score`, …), where the tracker can."""

    def alert(self, advice: Advice, step: int) -> None:  # noqa: B027  optional
        """Tell somebody of advice on the run, where the tracker can."""

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
        for _, metrics in sorted((earlier or {}).items()):
            self._watch.history.add(metrics)  # nothing is said about them
        self._stalls = StallWatch(running, lambda advice: self.alert(advice, self._step + 1))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step)
        self._step = step
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
