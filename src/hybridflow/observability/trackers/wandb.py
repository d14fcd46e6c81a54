"""Weights & Biases. Offline by default: no login is asked for unless WANDB_API_KEY or WANDB_MODE is set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hybridflow.observability.trackers.base import RunInfo, SampleRow, Tracker, import_extra, remembered_id


class WandbTracker(Tracker):
    """Sends scalars and a table of validation samples; a resumed run goes on under the same id.

    Raises ConfigError where wandb is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        self._wandb = import_extra("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        id_file = run.run_dir / "wandb_run_id.txt"
        self._run = self._wandb.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            id=remembered_id(id_file, run.resume_step is not None),
            resume="allow",
        )
        id_file.write_text(str(self._run.id), encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            data = [[str(row.get(name, "")) for name in columns] for row in rows]
            self._run.log({"val/generations": self._wandb.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()
