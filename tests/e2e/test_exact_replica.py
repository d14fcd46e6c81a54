"""Exact mode with generation in another process: one flipped bit stops the run and names the weight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_run import Inputs, metrics_of, small_run

from ranks import Command


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_bit_that_changes_in_another_process_stops_the_run(inputs: Inputs, tmp_path: Path) -> None:
    keys = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.exact=true",
        "actor_rollout_ref.model.external_lib=plant_a_bit",
        "trainer.controller=ray",
        "trainer.resource_pools={train: [1], generate: [1]}",
        "trainer.placement={rollout: generate}",
        "ray_kwargs.ray_init.num_cpus=2",
        "trainer.heartbeat_timeout=600",  # on a busy machine
        "trainer.startup_timeout=900",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    arguments = small_run(inputs, tmp_path / "run", *keys)
    done = Command("hybridflow.trainer.main_ppo", arguments, tmp_path / "log", environment=environment).wait()
    assert done.returncode == 1, done.output
    assert (
        "exact mode, step 2: rollout rank 0 has generated with another model.layers.0.mlp.down_proj.weight"
        in done.output
    )
    first = metrics_of(tmp_path / "run")
    assert sorted(first) == [1] and first[1]["training/rollout_log_probs_diff_max"] == 0.0
