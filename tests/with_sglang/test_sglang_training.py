"""A run that generates by SGLang: log-probs are those that training computes, after each update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.models.tiny import create_tiny_model

TOGETHER = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
"""Two processes train, and share one SGLang of two workers."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [(), TOGETHER], ids=["one", "two ranks"])
def test_rollout_and_training_agree_in_each_step(tmp_path: Path, more: tuple[str, ...]) -> None:
    model = create_tiny_model(tmp_path / "model", seed=0)
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path}/run",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.top_p=0.95",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "reward.function=random",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[jsonl]",
        *more,
    ]
    command = [sys.executable, "-m", "hybridflow.cli.main", "train", "--recipe", "tiny/grpo", *overrides]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=890
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "training/rollout_log_probs_diff_max" in line]
    assert len(steps) == 3 and max(line["training/rollout_log_probs_diff_max"] for line in steps) < 1e-4
    assert all(line["actor/grad_norm"] > 0 for line in steps)
    print(
        "\n".join(
            f"{line['training/rollout_log_probs_diff_max']:.1e} {line['actor/grad_norm']:.3f}"
            for line in steps
        )
    )
