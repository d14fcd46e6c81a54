"""A run on another machine goes on from the copies of its checkpoints, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tiny_trainer import sft_config, tiny_model

from hybridflow.trainer.sft.build import build

ADDRESS = "memory://resume/run"


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]


def fitted(model: Path, run: Path, *more: str, until: int = 3) -> Any:
    config = sft_config(model, run, "trainer.save_freq=1", *more)
    with build(config, patience=0.0, signals=None) as trainer:
        trainer.fit(lambda step, _: step == until)
        return trainer


@pytest.mark.slow
def test_a_run_on_another_machine_goes_on_from_the_copies(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
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
