"""Preference runs of one process and of two under a Ray of their own log the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_runs import assert_alike, under_ray
from tiny_run import metrics_of

from hybridflow.models.tiny import create_tiny_model
from hybridflow.trainer.main_dpo import main


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_two_processes_log_what_one_does(loss: str, tmp_path: Path) -> None:
    model = create_tiny_model(tmp_path / "model", hidden=32, intermediate=48, heads=2, kv_heads=1)
    keys = [
        f"model.path='{model}'",
        f"algorithm.loss={loss}",
        "data.task.name=arithmetic_preferences",
        "data.task.size=16",
        "data.task.val_size=6",
        "data.train_batch_size=5",
        "optim.lr=1e-2",
        "trainer.logger=[jsonl]",
        "trainer.num_threads=1",
        "trainer.total_training_steps=2",
    ]
    spread = ("trainer.n_gpus_per_node=2", f"trainer.default_local_dir='{tmp_path / 'two'}'")
    two = under_ray(tmp_path / "log", [*keys, *spread], module="hybridflow.trainer.main_dpo")
    try:
        assert main([*keys, f"trainer.default_local_dir='{tmp_path / 'one'}'"]) == 0
        done = two.wait()
        assert done.returncode == 0, done.output
    finally:
        two.kill()
    one = metrics_of(tmp_path / "one")
    got = metrics_of(tmp_path / "two")
    assert sorted(one) == [1, 2] and "val/margin" in one[2]
    assert_alike(one, got)
