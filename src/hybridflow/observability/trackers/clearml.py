"""ClearML. Offline in the run folder unless there are credentials; CLEARML_OFFLINE_MODE=1 keeps it there."""

from __future__ import annotations

import math
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
from hybridflow.observability.trackers.libraries import clearml_key_is_set

CACHE = "CLEARML_CACHE_DIR"

PATCHED = [
    "catboost",
    "detect_repository",
    "fastai",
    "gradio",
    "hydra",
    "joblib",
    "lightgbm",
    "matplotlib",
    "megengine",
    "pytorch",
    "scikit",
    "tensorboard",
    "tensorflow",
    "tfdefines",
    "xgboost",
]
"""What ClearML would watch by itself: it would send models and the repository beside what a run sends."""


class ClearmlTracker(Tracker):
    """Sends scalars and a table of validation samples; a resumed run continues its task.

    Offline, each start is a session of its own, a zip file in `clearml/offline` of the run folder. A resumed
    one begins with the earlier steps, so that the last session has them all. ClearML stores NaN and infinity
    as 0; such values are left out. Raises ConfigError where clearml is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        clearml = import_extra("clearml", "clearml")
        asked = os.environ.get("CLEARML_OFFLINE_MODE", "").lower() in ("1", "true", "yes", "on")
        offline = asked or not clearml_key_is_set()
        self._moved_cache = offline and CACHE not in os.environ
        if self._moved_cache:  # the only way to say where offline sessions go
            os.environ[CACHE] = str(run.run_dir.resolve() / "clearml")
        if offline:
            clearml.Task.set_offline(True)
        # no key says so: its forked process would outlive a killed run, and hold the lock of the run folder
        clearml.Task._report_subprocess_enabled = False
        id_file = run.run_dir / "clearml_task_id.txt"
        earlier_id = remembered_id(id_file, run.resume_step is not None and not offline)
        if earlier_id and earlier_id.startswith("offline-"):  # of a session, which no server knows
            earlier_id = None
        self._task = clearml.Task.init(
            project_name=run.project,
            task_name=run.experiment,
            reuse_last_task_id=False,
            continue_last_task=earlier_id or False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(PATCHED, False),
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        if earlier_id:
            self._task.set_initial_iteration(0)  # steps have their own numbers, not those after the last one
        id_file.write_text(str(self._task.id), encoding="utf-8")
        self._task.connect_configuration(dict(run.config), name="hybridflow")
        self._logger = self._task.get_logger()
        if not earlier_id:
            self.log_earlier(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):
                self._logger.report_scalar(title, series or title, float(value), step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            columns, data = table_of(rows)
            self._logger.report_table("val", "generations", step, table_plot=[columns, *data])

    def close(self, outcome: Outcome = "finished") -> None:
        self._logger.report_text(f"run {outcome}", print_console=False)
        self._task.flush(wait_for_uploads=True)
        if outcome == "failed":
            self._task.mark_failed(status_reason="the run failed")
        elif outcome == "interrupted":
            self._task.mark_stopped(status_message="a signal ended the run")
        self._task.close()
        if self._moved_cache:
            del os.environ[CACHE]
