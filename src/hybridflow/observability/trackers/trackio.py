"""Trackio. In its own folder (TRACKIO_DIR) unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names a place.

Its folder is not the run folder, because `trackio show` compares all runs of a project there.
"""

from __future__ import annotations

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
