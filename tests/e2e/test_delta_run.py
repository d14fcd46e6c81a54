"""A run whose weights are pushed as what has changed logs the numbers of one that pushes them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_runs import OWN_POOL, under_ray
from tiny_run import TIMINGS, Inputs, metrics_of, small_run

PUSHED = "rollout/pushed_bytes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_pushing_what_has_changed_changes_no_number(inputs: Inputs, tmp_path: Path) -> None:
    keys = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "trainer.controller=ray",
        *OWN_POOL,
    )
    found = []
    for delta in ("false", "true"):
        run = small_run(inputs, tmp_path / delta, *keys, f"actor_rollout_ref.rollout.delta_push={delta}")
        done = under_ray(tmp_path / f"{delta}.log", run).wait()
        assert done.returncode == 0, done.output
        found.append(metrics_of(tmp_path / delta))
    whole, changed = found
    assert sorted(whole) == sorted(changed) == [1, 2]
    for step, line in whole.items():
        same = {name: value for name, value in line.items() if not name.startswith((*TIMINGS, PUSHED))}
        assert same == {name: changed[step][name] for name in same}
    assert changed[2][PUSHED] < 0.5 * whole[2][PUSHED]
