"""The interface of a tracker, and the set of trackers that a run writes to."""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.errors import ConfigError, install_extra
from hybridflow.observability.health import HealthWatch

logger = logging.getLogger(__name__)

SampleRow = Mapping[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run for its trackers.

    run_dir: the run folder, which exists
    project, experiment: names for grouping
    config: the resolved configuration, nested
    total_steps: the last step, for the time left; None where unknown
    resume_step: the step of the checkpoint this run goes on from; None for a fresh run
    """

    run_dir: Path
    project: str = "hybridflow"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    resume_step: int | None = None


class Tracker(ABC):
    """Takes the metrics of each step, in rising order of steps; samples and closing are optional."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:  # noqa: B027  optional
        """Show validation samples (`prompt`, `response`, `score`, …), where the tracker can."""

    def close(self) -> None:  # noqa: B027  optional
        """Flush and let go."""


class Trackers(Tracker):
    """All trackers of a run as one, with health warnings logged on the way."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = list(trackers)
        self._health = HealthWatch()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step)
        for warning in self._health.new_warnings(metrics, step):
            logger.warning(warning)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for tracker in self.trackers:
            tracker.log_samples(rows, step)

    def close(self) -> None:
        with ExitStack() as stack:  # one that fails to close keeps none of the others open
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a tracker's library, or raise ConfigError naming the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger lists {extra!r}, but its library cannot be imported ({error}): "
            f"{install_extra(extra)}, or take {extra!r} out of trainer.logger"
        ) from error


def remembered_id(file: Path, resumed: bool) -> str | None:
    """Return the remote run's id from the run folder; None for a fresh run, and where none was written."""
    if resumed and file.exists():
        return file.read_text(encoding="utf-8").strip()
    return None
