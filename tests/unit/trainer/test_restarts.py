"""After a lost worker the run goes on from what it has saved itself, and never from anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from hybridflow.checkpoint import manifest
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig
from hybridflow.errors import ConfigError, WorkerLost
from hybridflow.trainer.restarts import Restarts

T = TypeVar("T")


def run_with_restarts(config: PPOConfig, attempt: Callable[[PPOConfig, float], T]) -> T:
    """What a run does with its attempts."""
    attempts = Restarts(config)
    while True:
        try:
            return attempt(attempts.config, attempts.patience)
        except WorkerLost as lost:
            attempts.after(lost)


def config_of(folder: Path, **keys: object) -> PPOConfig:
    config = PPOConfig()
    return replace(config, trainer=replace(config.trainer, default_local_dir=str(folder), **keys))  # type: ignore[arg-type]


def save(folder: Path, step: int) -> Path:
    return CheckpointStore(folder).save(step, {"trainer": {"step": step}})


def test_it_resumes_from_the_newest_checkpoint_of_this_run(tmp_path: Path) -> None:
    save(tmp_path, 7)  # of an earlier run: resume_mode=disable must not take it
    seen: list[tuple[str, str | None, float]] = []

    def attempt(config: PPOConfig, patience: float) -> str:
        trainer = config.trainer
        seen.append((trainer.resume_mode, trainer.resume_from_path, patience))
        if len(seen) == 2:
            save(tmp_path, 2)
        if len(seen) < 4:
            raise WorkerLost(f"loss {len(seen)}")
        return "done"

    assert (
        run_with_restarts(
            config_of(tmp_path, resume_mode="disable", max_restarts=3, startup_timeout=9.0), attempt
        )
        == "done"
    )
    mine = str(tmp_path / "global_step_2")
    assert seen == [
        ("disable", None, 0.0),
        ("disable", None, 9.0),
        ("resume_path", mine, 9.0),
        ("resume_path", mine, 9.0),
    ]


def test_a_damaged_checkpoint_of_this_run_is_passed_over_and_none_is_read_before_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 7)
    digest, read = manifest.file_digest, list[Path]()
    monkeypatch.setattr(manifest, "file_digest", lambda path: (read.append(path), digest(path))[1])
    seen: list[str | None] = []

    def attempt(config: PPOConfig, patience: float) -> None:
        seen.append(config.trainer.resume_from_path)
        if len(seen) == 1:
            assert read == []
            save(tmp_path, 1)
        if len(seen) == 2:
            damaged = save(tmp_path, 2) / "trainer" / "state.json"
            damaged.write_bytes(damaged.read_bytes().replace(b"2", b"3"))
        if len(seen) < 4:
            raise WorkerLost("gone")

    run_with_restarts(config_of(tmp_path, max_restarts=3), attempt)
    assert seen == [None, *[str(tmp_path / "global_step_1")] * 3]


def test_a_run_that_resumed_goes_on_from_there_until_it_has_saved(tmp_path: Path) -> None:
    start = str(save(tmp_path / "other", 5))
    config = config_of(tmp_path / "run", resume_mode="resume_path", resume_from_path=start, max_restarts=1)
    seen: list[str | None] = []

    def attempt(config: PPOConfig, patience: float) -> None:
        seen.append(config.trainer.resume_from_path)
        if len(seen) == 1:
            raise WorkerLost("gone")

    run_with_restarts(config, attempt)
    assert seen == [start, start]


@pytest.mark.parametrize(("allowed", "attempts"), [(0, 1), (2, 3)])
def test_the_last_loss_comes_through(tmp_path: Path, allowed: int, attempts: int) -> None:
    count = 0

    def attempt(config: PPOConfig, patience: float) -> None:
        nonlocal count
        count += 1
        raise WorkerLost(f"loss {count}")

    with pytest.raises(WorkerLost, match=f"loss {attempts}") as caught:
        run_with_restarts(config_of(tmp_path, max_restarts=allowed), attempt)
    assert count == attempts
    assert ("trainer.max_restarts=2" in str(getattr(caught.value, "__notes__", ""))) == bool(allowed)


def test_other_errors_are_not_restarted(tmp_path: Path) -> None:
    count = 0

    def attempt(config: PPOConfig, patience: float) -> None:
        nonlocal count
        count += 1
        raise ConfigError("no use in trying again")

    with pytest.raises(ConfigError):
        run_with_restarts(config_of(tmp_path, max_restarts=5), attempt)
    assert count == 1


def test_what_is_noted_on_a_loss_is_said_before_the_next_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0

    def attempt(config: PPOConfig, patience: float) -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            loss = WorkerLost("rollout rank 0 is lost")
            loss.add_note("open: version 3")
            raise loss
        return "done"

    assert run_with_restarts(config_of(tmp_path, max_restarts=1), attempt) == "done"
    assert "rollout rank 0 is lost\nopen: version 3" in caplog.text
