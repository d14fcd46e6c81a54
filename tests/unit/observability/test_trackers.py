from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from hybridflow.errors import ConfigError
from hybridflow.observability.timing import timeline
from hybridflow.observability.trackers import RunInfo, build_trackers
from hybridflow.observability.trackers.adapters import ClearmlTracker, WandbTracker
from hybridflow.observability.trackers.console import ConsoleTracker, duration
from hybridflow.observability.trackers.jsonl import JsonlTracker, has_validation_of, read_metrics

STEP = {
    "critic/rewards/mean": 0.53125,
    "actor/kl_loss": 0.0012,
    "actor/entropy": 0.83,
    "response_length/mean": 41.2,
    "perf/throughput": 12345.0,
    "timing_s/step": 3.0,
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_is_exact_and_joins_what_one_step_logs_twice(tmp_path: Path) -> None:
    tracker = JsonlTracker(RunInfo(tmp_path))
    third = 1 / 3
    tracker.log({"val-core/a/acc/mean@1": 0.5}, 0)
    tracker.log({"a": third, "n": math.nan}, 1)
    tracker.log({"b": 2.0}, 1)
    tracker.log({"a": 5e-324}, 2)
    tracker.close()
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == [0, 1, 2]
    assert written[1]["a"] == third and written[1]["b"] == 2.0 and math.isnan(written[1]["n"])
    assert written[2]["a"] == 5e-324


@pytest.mark.parametrize("rate", [1e-6, 5e-7, 3.3333333333333335e-08, 1e-12])
def test_a_small_learning_rate_is_not_rounded_to_zero(tmp_path: Path, rate: float) -> None:
    tracker = JsonlTracker(RunInfo(tmp_path))
    tracker.log({"actor/lr": rate}, 1)
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl")[0]["actor/lr"] == rate
    assert repr(rate) in (tmp_path / "metrics.jsonl").read_text()


def test_jsonl_after_a_resume_holds_each_step_once(tmp_path: Path) -> None:
    first = JsonlTracker(RunInfo(tmp_path))
    for step in (1, 2, 3, 4):
        first.log({"a": float(step)}, step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "a": 0.12')  # killed while writing
    second = JsonlTracker(RunInfo(tmp_path, resume_step=2))
    second.log({"val": 1.0}, 2)  # validation before training goes to the step of the checkpoint
    second.log({"a": 30.0}, 3)
    second.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0, "val": 1.0},
        {"step": 3, "a": 30.0},
    ]


def test_jsonl_of_a_fresh_run_moves_the_old_file_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        tracker = JsonlTracker(RunInfo(tmp_path))
        tracker.log({"a": value}, 1)
        tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 2.0}]
    assert lines(tmp_path / "metrics.previous.jsonl") == [{"step": 1, "a": 1.0}]


def test_jsonl_has_what_comes_late_under_its_own_step(tmp_path: Path) -> None:
    with build_trackers(["jsonl"], tmp_path) as trackers:
        trackers.log({"a": 1.0}, 1)
        trackers.log({"a": 2.0}, 2)
        trackers.log({"val-core/x": 0.5}, 1)
        trackers.log({"b": 3.0}, 2)
        trackers.log({"c": 4.0}, 2)
        trackers.log({"val-core/x": 0.75}, 2)
        trackers.log({"a": 5.0}, 3)
    wanted = {
        1: {"a": 1.0, "val-core/x": 0.5},
        2: {"a": 2.0, "b": 3.0, "c": 4.0, "val-core/x": 0.75},
        3: {"a": 5.0},
    }
    assert read_metrics(tmp_path / "metrics.jsonl") == wanted
    assert [has_validation_of(tmp_path, step) for step in (1, 2, 3, 4)] == [True, True, False, False]
    with build_trackers(["jsonl"], tmp_path, resume_step=2) as trackers:
        trackers.log({"a": 6.0}, 3)
        trackers.log({"val-core/x": 0.25}, 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 2], "a resumed run has one line for each step again"
    assert read_metrics(tmp_path / "metrics.jsonl") == {
        **wanted,
        2: {**wanted[2], "val-core/x": 0.25},
        3: {"a": 6.0},
    }


def test_the_spans_of_a_step_are_not_those_of_what_comes_late(tmp_path: Path) -> None:
    with build_trackers(["jsonl"], tmp_path) as trackers:
        timeline.add("driver", "adv", 1.0, 2.0)
        trackers.log({"a": 1.0}, 1)
        timeline.add("driver", "adv", 3.0, 4.0)
        trackers.log({"a": 2.0}, 2)
        timeline.add("driver", "reward", 5.0, 6.0)
        trackers.log({"val-core/x": 0.5}, 1)
        trackers.log({"a": 3.0}, 3)
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(line["step"], [span[2] for span in line["spans"]]) for line in lines] == [
        (1, [1.0]),
        (2, [3.0]),
        (3, [5.0]),
    ]


def test_wandb_has_validations_beside_training_on_an_axis_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    library = Recorder("wandb")
    library.id = "abc"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", library)
    config = {"trainer": {"val_in_background": True}}
    with build_trackers(["wandb"], tmp_path, config_dict=config) as trackers:
        trackers.log({"a": 1.0}, 1)
        trackers.log_samples(SAMPLES, 0)
        trackers.log({"val-core/x": 0.0}, 0)
        trackers.log({"a": 2.0}, 2)
        trackers.log({"b": 2.0}, 2)
        trackers.log({"val-core/x": 0.2}, 2)
        trackers.log({"a": 3.0}, 3)
        trackers.log({"a": 4.0, "val-core/x": 0.4}, 4)
        trackers.log({"val-core/x": 0.3}, 3)
        trackers.log({"a": 5.0}, 5)
        trackers.log({"val-core/x": 0.35}, 4)
        trackers.log({"a": 6.0}, 6)
        trackers.log({"a": 7.0}, 7)
        trackers.log({"val-core/x": 0.5}, 5)
        trackers.log({"val-core/x": 0.7}, 7)
    assert library.named("define_metric") == [
        (("val-core/*",), {"step_metric": "val/step"}),
        (("val-aux/*",), {"step_metric": "val/step"}),
    ]
    rows: dict[int, dict[str, float]] = {}
    newest = -1
    for (values,), kwargs in library.named("log"):
        assert kwargs["step"] >= newest, "wandb leaves out what goes back"
        newest = kwargs["step"]
        row = rows.setdefault(newest, {})
        assert not {*row} & {*values}, "wandb keeps the last of two values in a row"
        row |= values
    shown = sorted((row["val/step"], row["val-core/x"]) for row in rows.values() if "val/step" in row)
    assert shown == [(0, 0.0), (2, 0.2), (3, 0.3), (4, 0.35), (4, 0.4), (5, 0.5), (7, 0.7)]
    assert "val/generations" in rows[1]
    assert (rows[7]["val/step"], rows[8]["val/step"]) == (5, 7), "a late one is sent at once"


def test_jsonl_refuses_steps_that_go_back(tmp_path: Path) -> None:
    tracker = JsonlTracker(RunInfo(tmp_path))
    tracker.log({}, 3)
    with pytest.raises(AssertionError, match="step 2 is logged after step 3"):
        tracker.log({}, 2)


def test_read_metrics_of_a_missing_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == {}


def console_of(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=120, color_system=None, **options)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_console_line_on_a_pipe(tmp_path: Path) -> None:
    console, ticks = console_of(force_terminal=False), iter([0.0, 10.0, 14.0])
    tracker = ConsoleTracker(RunInfo(tmp_path, total_steps=70), console, clock=lambda: next(ticks))
    tracker.log(STEP, 1)
    tracker.log({**STEP, "actor/entropy": math.nan}, 2)
    tracker.close()
    first, second = text_of(console).splitlines()
    assert first == (
        "step  1/70 · reward +0.531 · kl 0.0012 · entropy 0.830 · length 41.2 · tok/s 12.3k · time 3.0s "
        "· left 3m 27s"
    )
    assert "entropy nan" in second and second.endswith("left 3m 31s")


def test_console_on_a_pipe_leaves_out_steps_that_follow_quickly(tmp_path: Path) -> None:
    console, clock = console_of(force_terminal=False), iter([0.1 * tick for tick in range(1000)])
    tracker = ConsoleTracker(RunInfo(tmp_path, total_steps=70), console, clock=lambda: next(clock))
    for step in range(1, 71):
        tracker.log({**STEP, **({"val/loss": 0.5} if step == 30 else {})}, step)
    shown = [
        int(line.split("/")[0].removeprefix("step"))
        for line in text_of(console).splitlines()
        if line.startswith("step")
    ]
    assert shown == [1, 21, 30, 50, 70]


def test_console_validation_table_shows_changes(tmp_path: Path) -> None:
    console = console_of(force_terminal=False)
    tracker = ConsoleTracker(RunInfo(tmp_path), console)
    for step, accuracy in ((0, 0.25), (10, 0.5), (20, 0.4)):
        tracker.log({"val-core/openai/gsm8k/acc/mean@4": accuracy}, step)
    table = text_of(console).split("validation at step 20")[1]
    row = next(line for line in table.splitlines() if "gsm8k" in line)
    assert row.split() == ["openai/gsm8k", "acc", "mean@4", "0.4000", "-0.1000", "+0.1500"]
    assert "step 20 ·" not in text_of(console), "a validation alone is no training step"


def test_names_of_metrics_stay_whole_in_a_log_file() -> None:
    code = (
        "from pathlib import Path; from hybridflow.observability.trackers.base import RunInfo; "
        "from hybridflow.observability.trackers.console import ConsoleTracker; tracker = "
        "ConsoleTracker(RunInfo(Path('.'))); "
        "metrics = {'val-core/arithmetic_chain/reward/mean@1': 0.5, 'val-aux/response_length/clip_ratio': "
        "1.0}; "
        "[tracker.log(metrics, step) for step in (1, 2)]"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.count("response_length/clip_ratio") == 2


def test_console_line_on_a_terminal_is_as_wide_as_the_terminal(tmp_path: Path) -> None:
    wanted = {
        120: "step 3/9 · reward +0.531 · kl 0.0012 · entropy 0.830 · length 41.2 · tok/s 12.3k · time 3.0s "
        "· left 18.0s",
        80: "step 3/9 · reward +0.531 · entropy 0.830 · length 41.2 · time 3.0s · left 18.0s",
        40: "step 3/9 · reward +0.531 · left 18.0s",
    }
    for width, line in wanted.items():
        console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
        tracker = ConsoleTracker(RunInfo(tmp_path, total_steps=9), console, clock=lambda: 0.0)
        tracker.log(STEP, 3)
        tracker.close()
        shown = [each for each in text_of(console).splitlines() if "reward" in each]
        assert [each[each.index("step") :].rstrip() for each in shown] == [line]


def test_console_says_nothing_of_time_left_after_the_last_step(tmp_path: Path) -> None:
    console = console_of(force_terminal=False)
    ConsoleTracker(RunInfo(tmp_path, total_steps=4), console).log(STEP, 4)
    assert "time 3.0s" in text_of(console) and "left" not in text_of(console)


def test_console_samples_keep_markup_as_text(tmp_path: Path) -> None:
    console = console_of(force_terminal=False)
    row = {"prompt": "[bold]1 + 1", "response": "x" * 500, "ground_truth": 2, "score": 1.0}
    ConsoleTracker(RunInfo(tmp_path), console).log_samples([row], 5)
    assert "[bold]1 + 1" in text_of(console)
    assert "(500 characters)" in text_of(console).replace("\n", " ")
    assert "1.00" in text_of(console)


@pytest.mark.parametrize(("seconds", "text"), [(8.44, "8.4s"), (185, "3m 05s"), (7620, "2h 07m")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_build_always_writes_jsonl_and_refuses_unknown_names(tmp_path: Path) -> None:
    with build_trackers("jsonl", tmp_path / "run") as trackers:
        trackers.log({"a": 1.0}, 1)
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "a": 1.0}]
    with pytest.raises(ConfigError, match="'tensorbord' is no tracker"):
        build_trackers(["tensorbord"], tmp_path)


def test_missing_tensorboard_is_skipped_only_when_it_was_a_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    names = [
        type(tracker).__name__ for tracker in build_trackers(["console", "tensorboard"], tmp_path).trackers
    ]
    assert names == ["JsonlTracker", "ConsoleTracker", "TimelineTracker"]
    with pytest.raises(ConfigError, match="install the extra 'tensorboard'"):
        build_trackers(["tensorboard"], tmp_path)


class Recorder(ModuleType):
    """A stand-in for a tracker's library: every call on it or on what it returns is written down."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name in ("init", "MlflowClient"):
                return self
            return SimpleNamespace(args=args, experiment_id="7", info=SimpleNamespace(run_id="r1"))

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


SAMPLES = [{"prompt": "1+1", "response": "2", "score": 1.0}]


def run_tracker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Recorder:
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    library = Recorder(name)
    library.id = "abc"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.setitem(sys.modules, f"{name}.entities", library)
    with build_trackers([name], tmp_path, "project", "experiment", {"a": {"b": 1}}, **options) as trackers:
        trackers.log({"val-core/x/acc/mean@4": 0.5}, 3)
        trackers.log_samples(SAMPLES, 3)
    return library


def test_wandb_is_offline_by_default_and_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = run_tracker("wandb", tmp_path, monkeypatch)
    ((_, init),) = library.named("init")
    assert (init["mode"], init["project"], init["name"], init["id"]) == (
        "offline",
        "project",
        "experiment",
        None,
    )
    assert library.named("log")[0] == (({"val-core/x/acc/mean@4": 0.5},), {"step": 3})
    assert library.named("Table")[0][1] == {
        "columns": ["prompt", "response", "score"],
        "data": [["1+1", "2", "1.0"]],
    }
    assert len(library.named("finish")) == 1
    again = run_tracker("wandb", tmp_path, monkeypatch, resume_step=2)
    assert again.named("init")[0][1]["id"] == "abc"
    WandbTracker(RunInfo(tmp_path, resume_step=2, earlier={2: {"a": 2.0}, 1: {"a": 1.0}}))
    earlier = [(args[0], kwargs["step"]) for args, kwargs in again.named("log")[-2:]]
    assert earlier == [({"a": 1.0}, 1), ({"a": 2.0}, 2)], "a file that a kill has cut lacks nothing"


def test_mlflow_is_local_by_default_and_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = run_tracker("mlflow", tmp_path, monkeypatch)
    assert library.named("MlflowClient")[0][1]["tracking_uri"] == f"sqlite:///{tmp_path.resolve()}/mlflow.db"
    params, metrics = (kwargs for _, kwargs in library.named("log_batch"))
    assert params["params"][0].args == ("a.b", "1")
    key, value, _, step = metrics["metrics"][0].args
    assert (key, value, step) == ("val-core/x/acc/mean_at_4", 0.5, 3)
    assert library.named("log_text")[0][0][2] == "generations/3.json"
    again = run_tracker("mlflow", tmp_path, monkeypatch, resume_step=2)
    assert not again.named("create_run") and again.named("set_terminated") == [(("r1", "FINISHED"), {})]


def test_swanlab_is_offline_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = run_tracker("swanlab", tmp_path, monkeypatch)
    assert library.named("init")[0][1]["mode"] == "offline"
    assert library.named("log")[0] == (({"val-core/x/acc/mean@4": 0.5},), {"step": 3})
    assert "prompt: 1+1" in library.named("Text")[0][0][0]


def test_passwords_of_addresses_stay_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder("swanlab")
    monkeypatch.setitem(sys.modules, "swanlab", library)
    config = {"a": {"b": ["sftp://me:secret@host/x", "s3://bucket/a@b", 1]}, "c": "http://me:secret@host:1"}
    config["trainer"] = {"alert_webhook": "https://hooks.example/secret"}
    build_trackers(["swanlab"], tmp_path, config_dict=config).close()
    sent = library.named("init")[0][1]["config"]
    assert sent == {
        "a": {"b": ["sftp://…@host/x", "s3://bucket/a@b", 1]},
        "c": "http://…@host:1",
        "trainer": {"alert_webhook": "…"},
    }


def test_clearml_online_begins_a_task_where_the_run_was_offline_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = MagicMock()
    library.Task.init.return_value.id = "f00"
    monkeypatch.setitem(sys.modules, "clearml", library)
    monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "key")
    monkeypatch.delenv("CLEARML_OFFLINE_MODE", raising=False)
    logger = library.Task.init.return_value.get_logger.return_value
    (tmp_path / "clearml_task_id.txt").write_text("offline-abc")
    run = RunInfo(tmp_path, resume_step=1, earlier={1: {"a/b": 2.0}})
    ClearmlTracker(run)
    assert library.Task.init.call_args.kwargs["continue_last_task"] is False
    logger.report_scalar.assert_called_once_with("a", "b", 2.0, 1)
    ClearmlTracker(run)
    assert library.Task.init.call_args.kwargs["continue_last_task"] == "f00"
    logger.report_scalar.assert_called_once()


def test_health_warnings_are_logged_once_in_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with build_trackers([], tmp_path) as trackers, caplog.at_level("WARNING", logger="hybridflow"):
        for step in range(1, 25):
            trackers.log({"response_length/clip_ratio": 0.75}, step)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 1", "step 21"]


def test_tensorboard_writes_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with build_trackers(["tensorboard"], tmp_path, config_dict={"a": 1}) as trackers:
        trackers.log({"a": 1.0}, 1)
        trackers.log_samples(SAMPLES, 1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1.0)]
