"""The trackers of other projects: each adapter has what its library does in its own way.

    RunInfo ──start──► the library's run, new or gone on with ──log, log_samples, close──► its own calls

Weights & Biases, SwanLab and ClearML keep a run in the run folder unless their own variables say otherwise or
there is a key; MLflow does so unless MLFLOW_TRACKING_URI names a place. Trackio writes into its own folder
(TRACKIO_DIR) unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names a place, because `trackio show` compares all
runs of a project there. Weave has no offline mode.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from hybridflow.config.tree import flatten
from hybridflow.observability.advice import Advice
from hybridflow.observability.trackers.base import Outcome, RunInfo, SampleRow, Tracker, import_extra
from hybridflow.observability.trackers.libraries import clearml_key_is_set, mode_of

Steps = Mapping[int, Mapping[str, float]]

ENDS: Mapping[str, Mapping[Outcome, Any]] = {
    "wandb": {"finished": 0, "failed": 1, "interrupted": 255},
    "trackio": {"finished": "INFO", "failed": "ERROR", "interrupted": "ERROR"},
    "swanlab": {"finished": "success", "failed": "crashed", "interrupted": "aborted"},
    "mlflow": {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"},
}
"""How libraries name the ends of a run. 255 is wandb's own status after Ctrl-C; Trackio has alerts alone."""


class LibraryTracker(Tracker):
    """A tracker whose library files a run under an id, which the run folder remembers for a resume.

    What takes the calls is `self._run`. Raises ConfigError where the library is missing.
    """

    library: ClassVar[str]
    """Name of the module, and of the extra that has it."""
    id_file: ClassVar[str]

    def __init__(self, run: RunInfo) -> None:
        self._sdk: Any = import_extra(self.library, self.library)
        self._run: Any = None
        file = run.run_dir / self.id_file
        known = None
        if run.resume_step is not None and file.exists():
            known = file.read_text(encoding="utf-8").strip()
        own_id, lacking = self.start(run, known)
        file.write_text(own_id, encoding="utf-8")
        for step, metrics in sorted(lacking.items()):
            self.log(metrics, step)

    @abstractmethod
    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        """Start the library's run, or continue the one `known` from before a resume; return its id, and the
        earlier steps that the library lacks.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            self._run.log({"val/generations": self._shown(rows)}, step=step)

    def _shown(self, rows: Sequence[SampleRow]) -> Any:
        columns, data = _table_of(rows)
        return self._sdk.Table(columns=columns, data=data)


def _table_of(rows: Sequence[SampleRow]) -> tuple[list[str], list[list[str]]]:
    """Return the columns of all rows together, and the rows as texts; what a row lacks is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[str(row.get(name, "")) for name in columns] for row in rows]


class WandbTracker(LibraryTracker):
    """Sends scalars and a table of validation samples; a resumed run goes on under the same id.

    Offline, each start has its own file, and `wandb sync` joins those of one id. A run that was killed
    may have lost the end of its file, so a resumed one begins with the earlier steps.

    wandb takes rows in rising order of steps alone. Validations beside training have an axis of their own
    (`val/step`), and each goes into the first row from the newest one on that has no other.
    """

    library = "wandb"
    id_file = "wandb_run_id.txt"
    step_metric = "val/step"

    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        self._has_axis = bool(run.config.get("trainer", {}).get("val_in_background"))
        self._newest = -1
        self._holds_validation = False
        self._late: list[dict[str, float]] = []
        mode = mode_of("wandb")
        self._run = self._sdk.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            id=known,
            resume="allow",
            settings=self._sdk.Settings(http_proxy=run.wandb_proxy, https_proxy=run.wandb_proxy),
        )
        if self._has_axis:
            for names in ("val-core/*", "val-aux/*"):
                self._run.define_metric(names, step_metric=self.step_metric)
        return str(self._run.id), run.earlier if mode == "offline" else {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step > self._newest:
            self._newest = step
            self._holds_validation = False
        if self._has_axis and any(name.startswith("val-") for name in metrics):
            self.log_late(metrics, step)
        else:
            super().log(metrics, step)
            self._send_late()

    def log_late(self, metrics: Mapping[str, float], step: int) -> None:
        self._late.append({**metrics, self.step_metric: step})
        self._send_late()

    def _send_late(self) -> None:
        """Send the oldest validation that waits, at once where the newest row has no other."""
        if self._late and not self._holds_validation:
            self._run.log(self._late.pop(0), step=self._newest)
            self._holds_validation = True

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        super().log_samples(rows, max(step, self._newest))

    def close(self, outcome: Outcome = "finished") -> None:
        for row in self._late:
            self._newest += 1
            self._run.log(row, step=self._newest)
        self._run.finish(exit_code=ENDS[self.library][outcome])


class TrackioTracker(LibraryTracker):
    """Sends scalars and a table of validation samples; a resumed run goes on under the same name.

    Trackio names runs and resumes by the name, so this one is the experiment's with a few random letters. It
    writes twice a second, so a run that was killed may lack its last steps: a resumed one begins with all the
    earlier ones, which are then there twice.
    """

    library = "trackio"
    id_file = "trackio_run_name.txt"

    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        name = known or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        self._run = self._sdk.init(
            project=run.project, name=name, config=dict(run.config), resume="allow", embed=False
        )
        return name, run.earlier

    def close(self, outcome: Outcome = "finished") -> None:
        level = getattr(self._sdk.AlertLevel, ENDS[self.library][outcome])
        self._run.alert(f"run {outcome}", level=level)
        self._run.finish()


class SwanlabTracker(LibraryTracker):
    """Sends scalars, and validation samples as texts; a resumed run goes on under the same id.

    Offline, each start has its own folder, and SwanLab writes its file only as the run ends. One that
    was killed has lost it, so a resumed one begins with the earlier steps.
    """

    library = "swanlab"
    id_file = "swanlab_run_id.txt"

    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        mode = mode_of("swanlab")
        run_id = known or uuid.uuid4().hex[:21]
        self._run = self._sdk
        self._sdk.init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            log_dir=str(run.run_dir / "swanlab"),
            mode=mode,
            id=run_id,
            resume="allow",
        )
        return run_id, run.earlier if mode == "offline" else {}

    def _shown(self, rows: Sequence[SampleRow]) -> Any:
        return [self._sdk.Text("\n".join(f"{name}: {value}" for name, value in row.items())) for row in rows]

    def close(self, outcome: Outcome = "finished") -> None:
        error = None if outcome == "finished" else f"the run was {outcome}"  # a state of failure wants a text
        self._run.finish(state=ENDS[self.library][outcome], error=error)


class MlflowTracker(LibraryTracker):
    """Sends scalars, the configuration as parameters and validation samples as JSON artifacts.

    The store is `mlflow.db` and `mlruns/` of the run folder: SQLite, since MLflow refuses plain files from
    3.13 on. A resumed run goes on under the same id, and gets what a run that was killed had not sent.
    MLflow allows no `@` in a name: `mean@4` becomes `mean_at_4`.
    """

    library = "mlflow"
    id_file = "mlflow_run_id.txt"
    step_metric = "training/global_step"
    """A metric that every step has."""
    max_params = 100  # a call
    max_param_length = 500  # characters; longer ones are cut
    max_metrics = 1000  # a call

    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        self._entities = import_extra("mlflow.entities", "mlflow")
        address, place = mlflow_store(run.run_dir)
        self._run = self._sdk.MlflowClient(tracking_uri=address)
        if known is None:
            experiment_id = mlflow_experiment(self._run, run.project, place)
            self._id = str(self._run.create_run(experiment_id, run_name=run.experiment).info.run_id)
            params = [
                self._entities.Param(_mlflow_name(key), str(value)[: self.max_param_length])
                for key, value in flatten(run.config)
                if value != {}
            ]
            self._send("params", params, self.max_params)
        else:
            self._id = known
            self._run.update_run(known, status="RUNNING")
        if not run.earlier:
            return self._id, {}
        held = {metric.step for metric in self._run.get_metric_history(self._id, self.step_metric)}
        return self._id, {step: metrics for step, metrics in run.earlier.items() if step not in held}

    def _send(self, kind: str, entities: Sequence[Any], most: int) -> None:
        for start in range(0, len(entities), most):
            self._run.log_batch(self._id, **{kind: entities[start : start + most]})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._entities.Metric(_mlflow_name(key), each, now, step) for key, each in metrics.items()]
        self._send("metrics", values, self.max_metrics)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        text = json.dumps([dict(row) for row in rows], indent=1, ensure_ascii=False, default=str)
        self._run.log_text(self._id, text, f"generations/{step}.json")

    def close(self, outcome: Outcome = "finished") -> None:
        self._run.set_terminated(self._id, ENDS[self.library][outcome])


def mlflow_store(run_dir: Path) -> tuple[str, str | None]:
    """Return the address of MLflow's store, in the run folder unless the environment names one, and the place
    of artifacts (None: as the store says).
    """
    if address := os.environ.get("MLFLOW_TRACKING_URI"):
        return address, None
    folder = run_dir.resolve()
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlruns").as_uri()


def mlflow_experiment(client: Any, name: str, place: str | None) -> str:
    """Return the id of the experiment of a project, which is made where there is none."""
    found = client.get_experiment_by_name(name)
    if found:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=place))


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


class WeaveTracker(LibraryTracker):
    """Sends the configuration, metrics and samples as calls of one thread, which a resumed run continues.

    Calls are `hybridflow.start`, `hybridflow.step`, `hybridflow.sample` and `hybridflow.end`.
    """

    library = "weave"
    id_file = "weave_thread_id.txt"

    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        os.environ.setdefault("WEAVE_PRINT_CALL_LINK", "false")  # its threads do not see the setting
        self._run = self._sdk.init(run.project, settings={"implicitly_patch_integrations": False})
        self._experiment = run.experiment
        self._thread_id = known or uuid.uuid4().hex
        self._call("start", {"config": dict(run.config), "resume_step": run.resume_step}, None)
        # a kill may have come before the step of the checkpoint was sent; of one sent twice the later counts
        lacking = {step: metrics for step, metrics in run.earlier.items() if step == run.resume_step}
        return self._thread_id, lacking

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("step", {"step": step}, dict(metrics))

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for row in rows:
            answer = {name: value for name, value in row.items() if name != "prompt"}
            self._call("sample", {"step": step, "prompt": row.get("prompt")}, answer)

    def close(self, outcome: Outcome = "finished") -> None:
        self._call("end", {}, {"outcome": outcome})
        self._sdk.finish()

    def _call(self, name: str, inputs: dict[str, Any], output: dict[str, Any] | None) -> None:
        with self._sdk.thread(self._thread_id):
            call = self._run.create_call(
                f"hybridflow.{name}",
                inputs,
                attributes={"experiment": self._experiment},
                display_name=f"{self._experiment} {name}",
                use_stack=False,
            )
            self._run.finish_call(call, output=output)


CLEARML_CACHE = "CLEARML_CACHE_DIR"
CLEARML_PATCHED = (
    "catboost detect_repository fastai gradio hydra joblib lightgbm matplotlib megengine pytorch scikit "
    "tensorboard tensorflow tfdefines xgboost"
)
"""What ClearML would watch by itself: it would send models and the repository beside what a run sends."""


class ClearmlTracker(LibraryTracker):
    """Sends scalars and a table of validation samples; a resumed run continues its task.

    Offline, also by CLEARML_OFFLINE_MODE=1, each start is a separate session, a zip file in
    `clearml/offline` of the run folder. A resumed one begins with the earlier steps, so that the last session
    has them all. ClearML stores NaN and infinity as 0; such values are left out.
    """

    library = "clearml"
    id_file = "clearml_task_id.txt"

    def start(self, run: RunInfo, known: str | None) -> tuple[str, Steps]:
        task = self._sdk.Task
        asked = os.environ.get("CLEARML_OFFLINE_MODE", "").lower() in ("1", "true", "yes", "on")
        offline = asked or not clearml_key_is_set()
        self._moved_cache = offline and CLEARML_CACHE not in os.environ
        if self._moved_cache:  # the only way to say where offline sessions go
            os.environ[CLEARML_CACHE] = str(run.run_dir.resolve() / "clearml")
        if offline:
            task.set_offline(True)
        # no key says so: its forked process would outlive a killed run, and hold the lock of the run folder
        task._report_subprocess_enabled = False
        if offline or (known or "").startswith("offline-"):  # no server knows such a session
            known = None
        self._run = task.init(
            project_name=run.project,
            task_name=run.experiment,
            reuse_last_task_id=False,
            continue_last_task=known or False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(CLEARML_PATCHED.split(), False),
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        if known:
            self._run.set_initial_iteration(0)  # steps have their own numbers, not those after the last one
        self._run.connect_configuration(dict(run.config), name="hybridflow")
        self._logger = self._run.get_logger()
        return str(self._run.id), {} if known else run.earlier

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):
                self._logger.report_scalar(title, series or title, float(value), step)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if rows:
            columns, data = _table_of(rows)
            self._logger.report_table("val", "generations", step, table_plot=[columns, *data])

    def close(self, outcome: Outcome = "finished") -> None:
        self._logger.report_text(f"run {outcome}", print_console=False)
        self._run.flush(wait_for_uploads=True)
        if outcome == "failed":
            self._run.mark_failed(status_reason="the run failed")
        elif outcome == "interrupted":
            self._run.mark_stopped(status_message="a signal ended the run")
        self._run.close()
        if self._moved_cache:
            del os.environ[CLEARML_CACHE]


class TensorBoardTracker(Tracker):
    """Writes scalars, and validation samples as text, into `tensorboard` of the run folder. The purge mark
    hides the steps after a resumed one.

    Raises ConfigError where the tensorboard package is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        library = import_extra("torch.utils.tensorboard", "tensorboard")
        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = library.SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge)
        if run.config:
            text = json.dumps(run.config, indent=2, default=str)
            self._writer.add_text("config", f"```json\n{text}\n```", 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for index, row in enumerate(rows):
            parts = []
            for name, value in row.items():
                code = str(value).replace("\n", "\n    ")  # a block of code: no markup in a response is read
                parts.append(f"**{name}**\n\n    {code}")
            self._writer.add_text(f"val/generations/{index}", "\n\n".join(parts), step)

    def close(self, outcome: Outcome = "finished") -> None:
        self._writer.add_text("outcome", f"run {outcome}")
        self._writer.close()


OF_LIBRARIES = (WandbTracker, MlflowTracker, SwanlabTracker, TrackioTracker, ClearmlTracker, WeaveTracker)
BY_LIBRARY: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    **{each.library: each for each in OF_LIBRARIES},
}
"""The trackers of other projects, by the names of their libraries."""


class WebhookTracker(Tracker):
    """Posts advice on a run to an address (`trainer.alert_webhook`), for a chat or an alert manager.

    It is JSON with `text`, which chats show, and with the same in parts. Metrics go to the other trackers.
    """

    timeout_seconds = 10.0

    def __init__(self, run: RunInfo) -> None:
        self._info = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send nothing."""

    def alert(self, advice: Advice, step: int) -> None:
        run = self._info
        assert run.alert_webhook is not None, "it is built where there is an address"
        parts = {
            "text": f"{run.project}/{run.experiment}, step {step}: {advice}",
            "project": run.project,
            "experiment": run.experiment,
            "run_dir": str(run.run_dir),
            "step": step,
            "rule": advice.rule,
            "message": advice.message,
            "keys": list(advice.keys),
        }
        httpx.post(run.alert_webhook, json=parts, timeout=self.timeout_seconds).raise_for_status()
