"""Profiles of steps: one trace with the driver's phases and every rank's calls."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config
from hybridflow.config.root import ProfilerConfig
from hybridflow.controller import Dispatch, LocalBackend, Worker, WorkerGroup, register
from hybridflow.errors import ConfigError
from hybridflow.observability import profiling
from hybridflow.observability.profiling import ProfiledSpan, Profiler, ProfileSettings, profiler
from hybridflow.observability.timing import Timer
from hybridflow.trainer.profiling import StepProfiler, trace_of


class Multiplier(Worker):
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def multiply(self) -> float:
        found: list[float] = []
        # an engine that generates is stepped in a thread of its own
        thread = threading.Thread(
            target=lambda: found.append(float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()))
        )
        thread.start()
        thread.join()
        return found[0]


@pytest.fixture
def groups() -> Any:
    backend = LocalBackend(
        lambda host: {"actor": lambda info: Multiplier(), "critic": lambda info: Multiplier()}
    )
    yield [WorkerGroup[Any](backend, "actor"), WorkerGroup[Any](backend, "critic")]
    backend.shutdown()


def lanes(trace: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the spans of each process, in the order of their starts."""
    events = trace["traceEvents"]
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    spans = sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"])
    return {name: [span["name"] for span in spans if span["pid"] == pid] for pid, name in named.items()}


def step(groups: list[WorkerGroup[Any]], timer: Timer) -> None:
    """Two phases, of which the first one calls a worker."""
    with timer("gen"):
        groups[0].call_one(0, Multiplier.multiply).result()
    with timer("update_actor"):
        pass


def test_only_the_steps_that_are_named_are_recorded(groups: list[WorkerGroup[Any]], tmp_path: Path) -> None:
    timer = Timer()
    recorded = StepProfiler(ProfilerConfig(tool="phases", steps=[2, 4]), groups, tmp_path)
    for number in range(1, 5):
        with recorded(number):
            step(groups, timer)
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == ["step_2.json", "step_4.json"]
    found = lanes(json.loads((tmp_path / "profile" / "step_2.json").read_text()))
    assert found == {"driver": ["critic.profile", "gen", "actor.multiply", "update_actor"]}
    assert not profiler.active


def test_torchs_profiler_writes_a_file_of_the_rank(groups: list[WorkerGroup[Any]], tmp_path: Path) -> None:
    settings = ProfilerConfig(tool="torch", save_path=str(tmp_path / "p"))
    with StepProfiler(settings, groups, tmp_path)(2):
        step(groups, Timer())
    trace = json.loads((tmp_path / "p" / "step_2.actor.0.torch.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in names and "gen" in names, "its operations lie in our phases"
    assert not (tmp_path / "p" / "step_2.critic.0.torch.json").exists(), "one process has one file"


def test_a_step_that_fails_leaves_nothing_recording(groups: list[WorkerGroup[Any]], tmp_path: Path) -> None:
    recorded = StepProfiler(ProfilerConfig(tool="phases"), groups, tmp_path)
    with pytest.raises(RuntimeError, match="in the step"), recorded(2):
        groups[0].role = "gone"  # whoever asks it anything gets another error
        raise RuntimeError("in the step")
    groups[0].role = "actor"
    assert not profiler.active and (tmp_path / "profile" / "step_2.json").exists()


def test_spans_of_processes_lie_on_one_axis() -> None:
    trace = trace_of(
        {
            "driver": [ProfiledSpan("gen", 100.0, 103.0, "main")],
            "actor 0": [
                ProfiledSpan("a", 100.5, 101.0, "ordered"),
                ProfiledSpan("b", 101.0, 102.0, "requests"),
            ],
        }
    )
    spans = {each["name"]: each for each in trace["traceEvents"] if each["ph"] == "X"}
    assert spans["gen"]["ts"] == 0 and spans["a"]["ts"] == 5e5 and spans["a"]["dur"] == 5e5
    assert spans["a"]["pid"] == spans["b"]["pid"] != spans["gen"]["pid"]
    assert spans["a"]["tid"] != spans["b"]["tid"]


def test_traces_without_a_place_are_refused(groups: list[WorkerGroup[Any]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"save_path=.*cannot be made \(Not a directory\)"):
        StepProfiler(ProfilerConfig("phases", save_path=str(tmp_path / "file" / "p")), groups, tmp_path)


def test_nothing_is_recorded_where_nobody_asked() -> None:
    own = Profiler()
    with own.span("x"):
        pass
    assert own.stop() == []


def test_a_tool_of_another_device_is_refused(tmp_path: Path) -> None:
    for tool in ("torch_memory", "nsys"):
        if not torch.cuda.is_available():
            own = Profiler()
            with pytest.raises(ConfigError, match="this process has no such device"):
                own.start(ProfileSettings(tool, tmp_path, "x"))  # type: ignore[arg-type]
            assert not own.active


def test_a_tool_that_cannot_record_is_refused_before_the_first_step(
    groups: list[WorkerGroup[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(ConfigError, match="tool=torch_memory records CUDA, and this process has no such"):
        StepProfiler(ProfilerConfig("torch_memory"), groups, tmp_path)
    seen = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: seen)
    monkeypatch.setattr(profiling.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="there is no nsys here"):
        StepProfiler(ProfilerConfig("nsys"), groups, tmp_path)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    StepProfiler(ProfilerConfig("nsys"), groups, tmp_path)


def test_verls_keys_of_profilers() -> None:
    loaded = load_config(
        PPOConfig,
        [
            "trainer.profile_steps=[1,2]",
            "global_profiler.tool=torch",
            "global_profiler.profile_continuous_steps=true",
            "actor_rollout_ref.actor.profiler.enable=true",
        ],
    )
    assert loaded.config.global_profiler == ProfilerConfig(tool="torch", steps=[1, 2])
    assert sum("has no effect" in note for note in loaded.notes) == 2
