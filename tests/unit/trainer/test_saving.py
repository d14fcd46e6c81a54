"""Checkpoints written while the run goes on: what counts when, what a failure or a kill leaves, and who is
told.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.checkpoint import sharded
from hybridflow.checkpoint.layout import TRACKER
from hybridflow.checkpoint.shard_index import read_tensors
from hybridflow.checkpoint.state import write_tensors
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.controller import LocalBackend
from hybridflow.errors import CheckpointError
from hybridflow.trainer import state as run_state
from hybridflow.trainer.state import RunSaves, SavedEngine
from hybridflow.workers.state import StatefulGroup, StatefulWorker

BESIDE, AT_ONCE = CheckpointContentsConfig(async_save=True), CheckpointContentsConfig()


class Numbers:
    """An engine whose whole state is what it was set to."""

    def __init__(self) -> None:
        self.value = torch.zeros(64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": {"w": self.value},
            "optimizer": {"w": {"exp_avg": self.value + 1}},
            "scheduler": {"num_steps": int(self.value[0])},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["model"]["w"])


class Gate:
    """Holds every write of tensors until it is opened; `fails` names the role whose disk is full."""

    def __init__(self) -> None:
        self.opened, self.reached, self.fails = threading.Event(), threading.Event(), ""
        self.written = 0

    def write(self, path: Path, tensors: dict[str, Tensor]) -> Any:
        self.reached.set()
        assert self.opened.wait(600)
        if self.fails and self.fails in path.parts:
            raise OSError(28, "No space left on device", str(path))
        digest = write_tensors(path, tensors)
        self.written += 1
        return digest


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(sharded, "write_tensors", gate.write)
    yield gate
    gate.opened.set()  # no thread waits on


class House:
    """Two roles with an engine, and their saves."""

    def __init__(self, run_dir: Path, keep: int | None = None, **contents: CheckpointContentsConfig) -> None:
        self.engines = {role: Numbers() for role in ("actor", "critic")}
        self.backend = LocalBackend(
            lambda host: {
                role: lambda info, role=role: StatefulWorker(self.engines[role]) for role in self.engines
            }
        )
        self.groups: dict[str, StatefulGroup[StatefulWorker]] = {
            role: StatefulGroup(self.backend, role) for role in self.engines
        }
        self.contents = {"actor": BESIDE, "critic": BESIDE} | contents
        self.store, self.saves = CheckpointStore(run_dir, keep), RunSaves()

    def save(self, step: int) -> Path:
        """With weights that are the step."""
        for engine in self.engines.values():
            engine.value.fill_(step)
        saved = {role: SavedEngine(group, self.contents[role]) for role, group in self.groups.items()}
        path = self.saves.save(
            self.store, step, {"trainer": {"step": step}}, saved, {"actor/huggingface": write_config}
        )
        for engine in self.engines.values():
            engine.value.fill_(-1)  # training goes on
        return path


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*"))


def hidden(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.iterdir() if path.name.startswith((".tmp", ".old", ".trash"))]


def assert_holds(house: House, step: int) -> None:
    """The newest checkpoint is of that step, whole, and gives its weights."""
    loaded = CheckpointStore(house.store.run_dir).load_latest()
    assert loaded is not None and loaded.step == step and loaded.state["trainer"] == {"step": step}
    assert loaded.engines == {role: {"model", "optimizer", "scheduler"} for role in house.engines}
    for role, group in house.groups.items():
        assert read_tensors(loaded.path / role, "optimizer")["w/exp_avg"].eq(step + 1).all()
        group.load(loaded.path / role, ["model"])
        assert house.engines[role].value.eq(step).all()


@pytest.mark.parametrize("critic", [BESIDE, AT_ONCE], ids=["both beside", "one at once"])
def test_it_counts_only_when_all_is_written(
    tmp_path: Path, gate: Gate, critic: CheckpointContentsConfig
) -> None:
    gate.opened.set()
    house = House(tmp_path, critic=critic)
    house.save(1)
    house.saves.commit(house.store)
    if critic is BESIDE:
        gate.opened.clear()
    assert house.save(2) == tmp_path / "global_step_2"
    if critic is BESIDE:
        for _ in range(3):
            house.saves.commit_done(house.store)  # the ends of steps
        assert steps(tmp_path) == [1] and (tmp_path / TRACKER).read_text() == "1"
        assert_holds(house, 1)
        gate.opened.set()
    while not all(group.save_done() for group in house.groups.values()):
        time.sleep(0.01)
    assert steps(tmp_path) == [1]
    house.saves.commit_done(house.store)
    assert steps(tmp_path) == [1, 2] and (tmp_path / TRACKER).read_text() == "2" and hidden(tmp_path) == []
    assert_holds(house, 2)
    house.saves.commit_done(house.store)
    assert house.saves.commit(house.store) is None, "nothing is under way"


def test_the_second_save_waits_for_the_first_and_rotation_keeps_the_newest(
    tmp_path: Path, gate: Gate
) -> None:
    house = House(tmp_path, keep=1)
    house.save(1)
    assert steps(tmp_path) == []
    threading.Timer(0.2, gate.opened.set).start()
    house.save(2)
    assert steps(tmp_path) == [1]
    house.saves.commit(house.store)
    assert steps(tmp_path) == [2]
    assert_holds(house, 2)


def test_no_other_process_saves_or_tidies_up_meanwhile(tmp_path: Path, gate: Gate) -> None:
    house = House(tmp_path)
    house.save(1)
    child = os.fork()
    if child == 0:
        try:
            CheckpointStore(tmp_path).save(2, {"trainer": {}})
        except CheckpointError as error:
            os._exit(0 if "another process is saving" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert hidden(tmp_path) and steps(tmp_path) == []
    gate.opened.set()
    house.saves.commit(house.store)
    assert_holds(house, 1)


def test_a_failed_write_names_role_rank_and_cause_and_leaves_what_was(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    house = House(tmp_path)
    house.save(1)
    house.saves.commit(house.store)
    gate.fails = "critic"
    house.save(2)
    with pytest.raises(
        CheckpointError,
        match=r"step 2 could not be written beside the run: critic, rank 0: .*No space left.*local_dir",
    ) as told:
        house.saves.commit(house.store)
    assert "those before it are as they were" in str(told.value)
    assert steps(tmp_path) == [1] and hidden(tmp_path) == [] and (tmp_path / TRACKER).read_text() == "1"
    gate.fails = ""
    house.save(3)
    house.saves.commit(house.store)
    assert steps(tmp_path) == [1, 3]
    assert_holds(house, 3)


def test_a_save_that_cannot_begin_ends_what_had_begun(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    gate.fails = "critic"
    house = House(tmp_path, critic=AT_ONCE)
    with pytest.raises(CheckpointError, match=r"No space left.*local_dir"):
        house.save(1)
    assert steps(tmp_path) == [] and hidden(tmp_path) == []
    gate.fails = ""
    house.save(2)
    house.saves.commit(house.store)
    assert_holds(house, 2)


def test_one_given_up_leaves_nothing_once_its_threads_are_done(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path)
    house.save(1)
    gate.reached.wait(600)
    threading.Timer(0.2, gate.opened.set).start()
    assert hidden(tmp_path) != []
    house.saves.abandon(house.store)
    assert gate.opened.is_set() and gate.written == 4, "both roles had written model and optimizer"
    assert hidden(tmp_path) == [] and steps(tmp_path) == [] and caplog.text == ""
    house.save(2)  # the same workers may save again
    house.saves.commit(house.store)
    assert steps(tmp_path) == [2]
    assert_holds(house, 2)


def test_one_given_up_does_not_wait_for_ever(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_state, "GIVE_UP_SECONDS", 0.1)
    house = House(tmp_path)
    house.save(1)
    gate.reached.wait(600)
    house.saves.abandon(house.store)
    assert hidden(tmp_path) == [] and "is still writing the checkpoint of step 1" in caplog.text
    gate.opened.set()
    again = House(tmp_path)
    again.save(2)
    again.saves.commit(again.store)
    assert steps(tmp_path) == [2]
    assert_holds(again, 2)


@pytest.mark.parametrize("moment", ["while writing", "written, not committed"])
def test_a_kill_leaves_the_checkpoint_before(tmp_path: Path, moment: str, gate: Gate) -> None:
    gate.opened.set()
    house = House(tmp_path)
    house.save(1)
    house.saves.commit(house.store)
    child = os.fork()
    if child == 0:
        if moment == "while writing":
            gate.opened.clear()
            gate.reached.clear()
        house.save(2)
        while not (
            gate.reached.is_set()
            if moment == "while writing"
            else all(group.save_done() for group in house.groups.values())
        ):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert hidden(tmp_path) and (tmp_path / TRACKER).read_text() == "1"
    assert_holds(house, 1)
    assert hidden(tmp_path) == [], "the next start tidies up"


def test_a_file_that_the_driver_does_not_see_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(path: Path, tensors: dict[str, Tensor]) -> Any:
        digest = write_tensors(path, tensors)
        path.rename(tmp_path / path.name)  # a folder of another node
        return digest

    monkeypatch.setattr(sharded, "write_tensors", elsewhere)
    house = House(tmp_path / "run", actor=AT_ONCE, critic=AT_ONCE)
    with pytest.raises(
        CheckpointError,
        match=(
            r"actor/.*safetensors is missing.*trainer\.default_local_dir must be on a file system that "
            r"all nodes"
        ),
    ):
        house.save(1)
    assert steps(tmp_path / "run") == [] and hidden(tmp_path / "run") == []
