"""A run on another machine goes on from the copies of its checkpoints, to the bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tiny_trainer import sft_config

from hybridflow.checkpoint.remote import RemoteCheckpoints
from hybridflow.errors import Stopped
from hybridflow.stop_token import stop_token
from hybridflow.trainer.sft.build import build

ADDRESS = "memory://resume/run"


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]


def fitted(model: Path, run: Path, *more: str, until: int = 3) -> Any:
    config = sft_config(model, run, "trainer.save_freq=1", *more)
    with build(config, patience=0.0) as trainer:
        trainer.fit(lambda step, _: step == until)
        return trainer


@pytest.mark.slow
def test_a_run_on_another_machine_goes_on_from_the_copies(model: Path, tmp_path: Path) -> None:
    fitted(model, tmp_path / "whole")
    remote = f"trainer.default_hdfs_dir='{ADDRESS}'"
    fitted(model, tmp_path / "here", remote, until=2)
    there = fitted(model, tmp_path / "there", remote, "trainer.max_ckpt_to_keep=1")
    assert losses(tmp_path / "here") + losses(tmp_path / "there") == losses(tmp_path / "whole")
    assert there.store.remote.failed == 0
    files, root = fsspec.core.url_to_fs(ADDRESS)
    assert [path.rpartition("/")[2] for path in files.ls(root, detail=False)] == ["global_step_3"]
    logged = [json.loads(line) for line in (tmp_path / "there" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["checkpoint/failed_copies"] == 0


def test_a_run_that_a_signal_ends_waits_for_the_copy_of_its_last_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "memory://signal/run"
    copy = RemoteCheckpoints._copy

    def slow_copy(*args: Any) -> None:
        time.sleep(0.5)
        copy(*args)

    monkeypatch.setattr(RemoteCheckpoints, "_copy", slow_copy)
    keys = ("trainer.save_freq=100", f"trainer.remote_checkpoint_dir='{address}'")
    config = sft_config(model, tmp_path / "run", *keys)

    def interrupt(step: int, _: object) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    with (
        pytest.raises(Stopped, match="step 1/3"),
        stop_token.listening(),
        build(config, patience=0.0) as trainer,
    ):
        trainer.fit(interrupt)
    files, root = fsspec.core.url_to_fs(address)
    assert files.exists(f"{root}/global_step_1/manifest.json")
