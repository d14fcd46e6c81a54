"""One changed byte in the newest checkpoint is named, and the run goes on from the one before."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from tiny_run import Inputs, metrics_of, small_run

from hybridflow.trainer.main_ppo import main as main_ppo


def flip_byte(path: Path) -> None:
    """Change the middle byte of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def largest_file(folder: Path) -> Path:
    """Where most of a checkpoint's bytes are."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def whole(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that saved each second."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main_ppo(small_run(inputs, run, "trainer.save_freq=2", steps=4)) == 0
    return run


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize("role", ["actor", "critic", "data", "trainer"])
def test_the_one_before_is_used(
    role: str, inputs: Inputs, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = metrics_of(saved)
    damaged = largest_file(saved / "global_step_4" / role)
    flip_byte(damaged)
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        assert main_ppo(small_run(inputs, saved, "trainer.save_freq=2", steps=6)) == 0
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert str(damaged) in errors[0]
    assert "SHA-256" in errors[0]
    assert "passed over" in errors[0]
    assert any(
        f"resumed after step 2 from {saved / 'global_step_2'}" in record.getMessage()
        for record in caplog.records
    )
    metrics = metrics_of(saved)
    assert sorted(metrics) == [1, 2, 3, 4, 5, 6]
    assert {step: metrics[step] for step in done} == done  # steps 3 and 4 were done again, to the same bits
    assert {path.name for path in saved.glob("global_step_*")} == {
        "global_step_2",
        "global_step_4",
        "global_step_6",
    }


def test_a_damaged_one_that_was_asked_for_is_refused(
    inputs: Inputs, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = saved / "global_step_4"
    flip_byte(largest_file(wanted))
    keys = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={wanted}")
    assert main_ppo(small_run(inputs, saved, *keys, steps=6)) == 1
    message = capsys.readouterr().err
    assert f"CheckpointError: {wanted} is no whole checkpoint" in message and "Traceback" not in message


def test_all_damaged_is_an_error(inputs: Inputs, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in saved.glob("global_step_*"):
        flip_byte(largest_file(folder))
    assert main_ppo(small_run(inputs, saved, steps=6)) == 1
    message = capsys.readouterr().err
    assert "all checkpoints" in message
    assert "steps 2, 4" in message
    assert "trainer.resume_mode=disable" in message
    assert metrics_of(saved)[4]  # the refused run changed nothing
