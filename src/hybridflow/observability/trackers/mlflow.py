"""MLflow: a store in the run folder (`mlflow.db`, `mlruns/`), or where MLFLOW_TRACKING_URI says.

SQLite and not plain files: MLflow keeps its file store in maintenance mode and refuses it from 3.13 on.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridflow.config.tree import flatten
from hybridflow.observability.trackers.base import (
    Outcome,
    RunInfo,
    SampleRow,
    Tracker,
    import_extra,
    remembered_id,
)

STEP_METRIC = "training/global_step"
"""A metric that every step has."""
_MAX_PARAMS = 100  # a call
_MAX_PARAM_LENGTH = 500  # characters; longer ones are cut
_MAX_METRICS = 1000  # a call
_STATUSES: Mapping[Outcome, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker(Tracker):
    """Sends scalars, the configuration as parameters and validation samples as JSON artifacts.

    A resumed run goes on under the same id.

    MLflow allows no `@` in a name: `mean@4` becomes `mean_at_4`. Raises ConfigError where mlflow is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        mlflow = import_extra("mlflow", "mlflow")
        self._entities = import_extra("mlflow.entities", "mlflow")
        folder = run.run_dir.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        id_file = run.run_dir / "mlflow_run_id.txt"
        run_id = remembered_id(id_file, run.resume_step is not None)
        if run_id is None:
            experiment_id = self._experiment_id(run.project, None if uri else (folder / "mlruns").as_uri())
            run_id = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
            params = [
                self._entities.Param(_name(key), str(value)[:_MAX_PARAM_LENGTH])
                for key, value in flatten(run.config)
                if value != {}
            ]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])
            id_file.write_text(run_id, encoding="utf-8")
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        if run.earlier:  # a run that was killed may lack its last steps
            history = self._client.get_metric_history(run_id, STEP_METRIC)
            held = {metric.step for metric in history}
            self.log_earlier(replace(run, earlier={s: m for s, m in run.earlier.items() if s not in held}))

    def _experiment_id(self, name: str, artifact_location: str | None) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=artifact_location))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        entities = [self._entities.Metric(_name(key), value, now, step) for key, value in metrics.items()]
        for start in range(0, len(entities), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=entities[start : start + _MAX_METRICS])

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        text = json.dumps([dict(row) for row in rows], indent=1, ensure_ascii=False, default=str)
        self._client.log_text(self._run_id, text, f"generations/{step}.json")

    def close(self, outcome: Outcome = "finished") -> None:
        self._client.set_terminated(self._run_id, _STATUSES[outcome])


def _name(name: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))
