"""Preference runs of one process and of two under a Ray of their own log the same numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_run import metrics_of

from hybridflow.models.tiny import create_tiny_model
from hybridflow.trainer.main_dpo import main
from ranks import Command


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
    patient = ("trainer.heartbeat_timeout=600", "trainer.startup_timeout=900")  # on a busy machine
    spread = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2", *patient)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["OMP_NUM_THREADS"] = "1"
    arguments = [*spread, *keys, f"trainer.default_local_dir='{tmp_path / 'two'}'"]
    # a process of its own: this one may be in another test's Ray
    two = Command("hybridflow.trainer.main_dpo", arguments, tmp_path / "log", environment=environment)
    try:
        assert main([*keys, f"trainer.default_local_dir='{tmp_path / 'one'}'"]) == 0
        done = two.wait()
        assert done.returncode == 0, done.output
    finally:
        two.kill()
    one = metrics_of(tmp_path / "one")
    got = metrics_of(tmp_path / "two")
    assert sorted(got) == sorted(one) == [1, 2] and "val/margin" in one[2]
    for step, metrics in one.items():
        assert sorted(got[step]) == sorted(metrics)
        for name, value in metrics.items():
            assert got[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
