"""SwanLab. Offline by default: no login is asked for unless SWANLAB_API_KEY or SWANLAB_MODE is set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hybridflow.observability.trackers.base import RunInfo, SampleRow, Tracker, import_extra


class SwanlabTracker(Tracker):
    """Sends scalars, and validation samples as texts.

    Raises ConfigError where swanlab is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        self._swanlab = import_extra("swanlab", "swanlab")
        chosen = os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY")
        self._swanlab.init(
            project=run.project,
            experiment_name=run.experiment,
            config=dict(run.config),
            logdir=str(run.run_dir / "swanlab"),
            mode=None if chosen else "offline",  # None: as its environment says
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            texts = [
                self._swanlab.Text("\n".join(f"{name}: {value}" for name, value in row.items()))
                for row in rows
            ]
            self._swanlab.log({"val/generations": texts}, step=step)

    def close(self) -> None:
        self._swanlab.finish()
