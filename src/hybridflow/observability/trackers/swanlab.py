"""SwanLab. Offline in the run folder unless SWANLAB_MODE says otherwise or there is a key."""

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
)
from hybridflow.observability.trackers.libraries import swanlab_key_is_set

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
