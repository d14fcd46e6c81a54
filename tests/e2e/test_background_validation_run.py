"""Validation beside training under Ray: the numbers and the weights of a run that waits for it, also when the
process of the replica, or that of the run, is killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from kill_resume import differences
from ray_runs import OWN_POOL, under_ray
from tiny_run import Inputs, metrics_of, small_run

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.trainer.main_ppo import main
from hybridflow.trainer.ppo.validation import Validator
from validation_keys import SAMPLED_VALIDATIONS

STEPS = 6
BESIDE = ("trainer.val_in_background=true", "reward.num_workers=1", "ray_kwargs.ray_init.num_cpus=4")


def command(inputs: Inputs, out: Path, *more: str) -> list[str]:
    return small_run(inputs, out, f"data.val_files={inputs.val}", *SAMPLED_VALIDATIONS, *more, steps=STEPS)


@pytest.fixture(scope="module")
def ordinary(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run in one process that waits for its validations."""
    run = tmp_path_factory.mktemp("ordinary") / "run"
    assert main(command(inputs, run)) == 0
    return run


def validations_of(run: Path) -> list[int]:
    """Return the steps of the lines that have a validation, in order; a step twice is there twice."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return sorted(int(line.split('"step": ')[1].split(",")[0]) for line in lines if "val-core" in line)


def kill_the_replica(monkeypatch: pytest.MonkeyPatch) -> tuple[list[RayBackend], list[int]]:
    """Have the replica's process killed at the validation of step 2; return the lists of a run's backends and
    of the process's id, which fill as it goes on.
    """
    backends: list[RayBackend] = []
    made = RayBackend.__init__
    measure = Validator.measure
    pids: list[int] = []

    def note(self: RayBackend, *args: Any, **kwargs: Any) -> None:
        backends.append(self)
        made(self, *args, **kwargs)

    def measured(self: Validator, step: int, rollout: Any) -> Any:
        if step == 2 and len(backends) == 2:
            (process,) = backends[-1]._processes.values()
            pids.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)  # before its first answer
        return measure(self, step, rollout)

    monkeypatch.setattr(RayBackend, "__init__", note)
    monkeypatch.setattr(Validator, "measure", measured)
    return backends, pids


@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("other-ray")
def test_the_process_of_the_replica_is_killed_and_the_numbers_are_those_of_a_run_that_waits(
    inputs: Inputs,
    ordinary: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backends, pids = kill_the_replica(monkeypatch)
    assert main(command(inputs, tmp_path / "run", *BESIDE)) == 0
    assert len(backends) == 3 and len(pids) == 1 and not psutil.pid_exists(pids[0])
    assert "the replica that validates was started again" in caplog.text
    assert differences(tmp_path / "run", ordinary) == []
    assert validations_of(tmp_path / "run") == [0, 2, 4, 6]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("other-ray")
def test_beside_generation_without_a_pause_each_step_has_the_validation_of_its_checkpoint(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (
        "trainer.schedule=fully_async",
        "trainer.total_training_steps=4",
        "algorithm.rollout_correction.rollout_is=token",
    )
    run = tmp_path / "run"
    backends, pids = kill_the_replica(monkeypatch)
    assert main(command(inputs, run, *keys, *OWN_POOL, *BESIDE)) == 0
    assert len(backends) == 3 and len(pids) == 1 and not psutil.pid_exists(pids[0])
    assert "the replica that validates was started again" in caplog.text
    assert validations_of(run) == [0, 2, 4]
    for step in (2, 4):
        again = tmp_path / f"again_{step}"
        checkpoint = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_{step}")
        assert main(command(inputs, again, *keys, "trainer.val_only=true", *checkpoint)) == 0
        of_step = [
            {name: value for name, value in metrics_of(each)[step].items() if name.startswith("val-")}
            for each in (run, again)
        ]
        assert of_step[0] == of_step[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_run_that_is_killed_goes_on_and_has_each_validation_once(
    inputs: Inputs, ordinary: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = command(inputs, out, *BESIDE[:2])
    kill = {"KILL_AT_STEP": "3"}
    first = under_ray(tmp_path / "first", arguments, cpus=4, module="dying_validation", variables=kill)
    assert first.wait().returncode == -signal.SIGKILL
    logged = metrics_of(out)
    assert not any("val-" in name for name in logged[2]), "it was under way"
    second = under_ray(tmp_path / "second", arguments, cpus=4)
    done = second.wait()
    assert done.returncode == 0, done.output
    assert validations_of(out) == [0, 2, 4, 6]
    assert differences(out, ordinary) == []
