"""Weights & Biases. Offline in the run folder unless WANDB_MODE says otherwise or there is a key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hybridflow.observability.trackers.base import (
    Outcome,
    RunInfo,
    SampleRow,
    Tracker,
    import_extra,
    remembered_id,
    table_of,
)
from hybridflow.observability.trackers.libraries import wandb_key_is_set

_EXIT_CODES: Mapping[Outcome, int] = {"finished": 0, "failed": 1, "interrupted": 255}
"""Status with which wandb ends a run; 255 is its own status of one that Ctrl-C has ended."""


class WandbTracker(Tracker):
    """Sends scalars and a table of validation samples; a resumed run goes on under the same id.

    Offline, each start has a file of its own, and `wandb sync` joins those of one id. A run that was killed
    may have lost the end of its file, so a resumed one begins with the earlier steps. Raises ConfigError
    where wandb is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        self._wandb = import_extra("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb_key_is_set() else "offline")
        id_file = run.run_dir / "wandb_run_id.txt"
        self._run = self._wandb.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            id=remembered_id(id_file, run.resume_step is not None),
            resume="allow",
            settings=self._wandb.Settings(http_proxy=run.wandb_proxy, https_proxy=run.wandb_proxy),
        )
        id_file.write_text(str(self._run.id), encoding="utf-8")
        if mode == "offline":
            self.log_earlier(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            columns, data = table_of(rows)
            self._run.log({"val/generations": self._wandb.Table(columns=columns, data=data)}, step=step)

    def close(self, outcome: Outcome = "finished") -> None:
        self._run.finish(exit_code=_EXIT_CODES[outcome])
