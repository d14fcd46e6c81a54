"""Exact mode with generation in another process: one flipped bit stops the run and names the weight."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_runs import OWN_POOL, under_ray
from tiny_run import Inputs, metrics_of, small_run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_bit_that_changes_in_another_process_stops_the_run(inputs: Inputs, tmp_path: Path) -> None:
    keys = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.exact=true",
        "actor_rollout_ref.model.external_lib=plant_a_bit",
        "trainer.controller=ray",
        *OWN_POOL,
    ]
    done = under_ray(tmp_path / "log", small_run(inputs, tmp_path / "run", *keys)).wait()
    assert done.returncode == 1, done.output
    assert (
        "exact mode, step 2: rollout rank 0 has generated with another model.layers.0.mlp.down_proj.weight"
        in done.output
    )
    first = metrics_of(tmp_path / "run")
    assert sorted(first) == [1] and first[1]["training/rollout_log_probs_diff_max"] == 0.0
