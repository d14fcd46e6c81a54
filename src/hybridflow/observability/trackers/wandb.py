"""Weights & Biases, and two libraries that are used as it is: Trackio and SwanLab.

Weights & Biases and SwanLab write offline into the run folder unless WANDB_MODE or SWANLAB_MODE says
otherwise or there is a key. Trackio writes into its own folder (TRACKIO_DIR) unless TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL names a place: not into the run folder, because `trackio show` compares all runs of a
project there.
"""

from __future__ import annotations

import os
import uuid
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
from hybridflow.observability.trackers.libraries import swanlab_key_is_set, wandb_key_is_set

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


class TrackioTracker(Tracker):
    """Sends scalars and a table of validation samples; a resumed run goes on under the same name.

    Trackio names runs and resumes by the name, so this one is the experiment's with a few random letters. It
    writes twice a second, so a run that was killed may lack its last steps: a resumed one begins with all the
    earlier ones, which are then there twice.
    Raises ConfigError where trackio is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        self._trackio = import_extra("trackio", "trackio")
        id_file = run.run_dir / "trackio_run_name.txt"
        name = (
            remembered_id(id_file, run.resume_step is not None) or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        )
        self._run = self._trackio.init(
            project=run.project,
            name=name,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        id_file.write_text(name, encoding="utf-8")
        self.log_earlier(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            columns, data = table_of(rows)
            self._run.log({"val/generations": self._trackio.Table(columns=columns, data=data)}, step=step)

    def close(self, outcome: Outcome = "finished") -> None:
        level = self._trackio.AlertLevel.INFO if outcome == "finished" else self._trackio.AlertLevel.ERROR
        self._run.alert(f"run {outcome}", level=level)  # Trackio has no states of runs
        self._run.finish()


_STATES: Mapping[Outcome, str] = {"finished": "success", "failed": "crashed", "interrupted": "aborted"}


class SwanlabTracker(Tracker):
    """Sends scalars, and validation samples as texts; a resumed run goes on under the same id.

    Offline, each start has a folder of its own, and SwanLab writes its file only as the run ends. One that
    was killed has lost it, so a resumed one begins with the earlier steps. Raises ConfigError where swanlab
    is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        self._swanlab = import_extra("swanlab", "swanlab")
        mode = os.environ.get("SWANLAB_MODE") or ("online" if swanlab_key_is_set() else "offline")
        id_file = run.run_dir / "swanlab_run_id.txt"
        run_id = remembered_id(id_file, run.resume_step is not None) or uuid.uuid4().hex[:21]
        self._swanlab.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            log_dir=str(run.run_dir / "swanlab"),
            mode=mode,
            id=run_id,
            resume="allow",
        )
        id_file.write_text(run_id, encoding="utf-8")
        if mode == "offline":
            self.log_earlier(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            texts = [
                self._swanlab.Text("\n".join(f"{name}: {value}" for name, value in row.items()))
                for row in rows
            ]
            self._swanlab.log({"val/generations": texts}, step=step)

    def close(self, outcome: Outcome = "finished") -> None:
        state = _STATES[outcome]
        # a state of failure wants a text
        self._swanlab.finish(state=state, error=None if state == "success" else f"the run was {outcome}")
