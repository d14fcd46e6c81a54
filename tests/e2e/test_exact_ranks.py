"""Exact mode over two processes: log-probs of generation and of training are equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_runs import under_ray
from tiny_run import Inputs, metrics_of, small_run

from hybridflow.models.tiny import create_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"
TENSOR = (
    "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
)
LAYOUTS = {
    "shared weights": ("trainer.n_gpus_per_node=2",),
    "shared weights in 4 bits": (
        *("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4"),
        "actor_rollout_ref.model.quantization=nf4",
    ),
    "cut layers": ("trainer.n_gpus_per_node=2", *TENSOR),
    "a replica apart": (
        "trainer.resource_pools={train: [2], generate: [1]}",
        "trainer.placement={rollout: generate}",
    ),
}


@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("shared weights", marks=pytest.mark.slow),
        pytest.param("shared weights in 4 bits", marks=pytest.mark.slow),
        "cut layers",
        pytest.param("a replica apart", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_generate_and_train_with_equal_log_probs(
    inputs: Inputs, tmp_path: Path, layout: str
) -> None:
    keys = (
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.exact=true",
        "trainer.controller=ray",
        *LAYOUTS[layout],
    )
    model = create_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=2, intermediate=64)
    keys += (f"actor_rollout_ref.model.path={model}",)
    done = under_ray(tmp_path / "log", small_run(inputs, tmp_path / "run", *keys), cpus=3).wait()
    assert done.returncode == 0 and "exact mode: generation and training" in done.output, done.output
    found = metrics_of(tmp_path / "run")
    assert sorted(found) == [1, 2]
    for line in found.values():
        assert line["training/rollout_log_probs_diff_max"] == 0.0
        assert line["training/old_log_probs_from_rollout"] == 1.0
        assert line["training/first_ratio_min"] == line["training/first_ratio_max"] == 1.0
        assert line["training/rollout_rows_checked"] > 0
