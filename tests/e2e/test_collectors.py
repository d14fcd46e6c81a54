"""Runs whose groups are played by collectors: the same numbers as without, and nothing dropped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import echo_world
import pytest
from kill_resume import STEPS, differences
from ray_runs import OF_EACH_PROCESS, OWN_POOL, assert_alike, under_ray
from tiny_run import Inputs, metrics_of, small_run

from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger
from ranks import Command

OF_THE_WAY = (
    *OF_EACH_PROCESS,
    *("reward/", "rollout/", "agent/max_concurrent"),
    *("training/unfiltered_score/", "training/reward_baseline/"),
)
"""Metrics of how the work was done: requests join one by one, and several processes have their own limits;
and means in float32 that are summed group by group.
"""
GRPO = ("algorithm.adv_estimator=grpo",)
PPO = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true")
BYPASS = (
    *GRPO,
    "algorithm.rollout_correction.bypass_mode=true",
    "algorithm.rollout_correction.rollout_is=token",
)
REMAX = (
    "algorithm.adv_estimator=remax",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=score",
)
PICKY = '''"""A reward that fails on every other response, more or less."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if sum(map(ord, solution_str)) % 2:
        raise ValueError("an odd answer")
    return len(solution_str) % 5
'''
DEADLY = '''"""A reward that ends the process that calls it."""
import os
import signal


def compute_score(data_source, solution_str, ground_truth, extra_info):
    os.kill(os.getpid(), signal.SIGKILL)
'''
ONE_POOL = "trainer.n_gpus_per_node=1"


def collected(inputs: Inputs, out: Path, collectors: int, *keys: str) -> Command:
    """Start a run with so many collectors, and a process for generation unless the keys have one pool."""
    cluster = (
        *(() if ONE_POOL in keys else OWN_POOL),
        "trainer.controller=ray",
        f"trainer.num_collectors={collectors}",
        f"trainer.save_freq={STEPS}",
    )
    return under_ray(out.with_suffix(".log"), small_run(inputs, out, *cluster, *keys, steps=STEPS))


def finished(command: Command) -> str:
    done = command.wait()
    assert done.returncode == 0, done.output
    return str(done.output)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("other-ray")
@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        (GRPO, (1, 2)),
        (PPO, (2,)),
        (echo_world.KEYS, (2,)),
        (REMAX, (2,)),
        ((*GRPO, ONE_POOL), (2,)),
        ((*GRPO, "trainer.schedule=one_step_off", "algorithm.rollout_correction.rollout_is=token"), (2,)),
    ],
    ids=["grpo", "ppo", "agents", "remax, filtered", "one pool", "one step off"],
)
def test_collectors_give_the_numbers_of_a_run_without(
    inputs: Inputs, tmp_path: Path, keys: tuple[str, ...], numbers: tuple[int, ...]
) -> None:
    finished(collected(inputs, tmp_path / "0", 0, *keys))
    for number in numbers:
        output = finished(collected(inputs, tmp_path / str(number), number, *keys))
        assert "collector)" in output, output  # among the roles that were built
        # the ledger of a schedule that runs ahead is in the checkpoint, in the order of events
        without = ("data/",) if "trainer.schedule=one_step_off" in keys else ()
        found = differences(tmp_path / str(number), tmp_path / "0", OF_THE_WAY, last_files_without=without)
        assert not found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("other-ray")
def test_where_kernels_vary_by_batch_only_the_last_bits_differ(inputs: Inputs, tmp_path: Path) -> None:
    for number in (0, 2):  # without exact mode
        finished(collected(inputs, tmp_path / str(number), number, *BYPASS))
    without, found = (metrics_of(tmp_path / name) for name in ("0", "2"))
    assert_alike(without, found, without=OF_THE_WAY, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("other-ray")
def test_a_run_without_a_pause_drops_nothing_and_goes_on_from_its_checkpoint(
    inputs: Inputs, tmp_path: Path
) -> None:
    keys = (
        *GRPO,
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.schedule=fully_async",
        "trainer.async.run_ahead=1.5",
        "trainer.async.max_staleness=3",
    )
    out = tmp_path / "run"
    finished(collected(inputs, out, 2, *keys, "trainer.save_freq=2"))
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={out / 'global_step_2'}")
    finished(collected(inputs, tmp_path / "resumed", 1, *keys, *resumed))
    for folder in (out, tmp_path / "resumed"):
        with Ledger(folder / LEDGER_FILE) as ledger:
            state = ledger.state
        assert state.trained_per_step == [4] * STEPS and state.num_admitted == 4 * STEPS
        name = "training/off_policy/trajectory_staleness_worst/max"
        assert max(values.get(name, 0.0) for values in metrics_of(folder).values()) <= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("other-ray")
def test_rewards_that_fail_are_counted_as_without_collectors(inputs: Inputs, tmp_path: Path) -> None:
    reward = tmp_path / "picky.py"
    reward.write_text(PICKY)
    keys = (*GRPO, f"reward.custom_reward_function.path={reward}")
    for number in (0, 2):
        finished(collected(inputs, tmp_path / str(number), number, *keys, "reward.on_error=drop"))
    assert not differences(tmp_path / "2", tmp_path / "0", OF_THE_WAY)
    failed = [line.get("training/num_failed/environment", 0) for line in metrics_of(tmp_path / "2").values()]
    assert sum(failed) > 0
    told = [json.loads((tmp_path / name / "failures.json").read_text()) for name in ("0", "2")]
    assert told[0] == told[1] == {"environment": "the reward failed (ValueError)"}
    done = collected(inputs, tmp_path / "raises", 2, *keys, "reward.on_error=raise").wait()
    assert done.returncode == 1 and "reward.on_error=zero scores such rows 0" in done.output, done.output


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("other-ray")
def test_a_collector_that_dies_is_named(inputs: Inputs, tmp_path: Path) -> None:
    reward = tmp_path / "deadly.py"
    reward.write_text(DEADLY)
    keys = (*GRPO, f"reward.custom_reward_function.path={reward}")
    done = collected(inputs, tmp_path / "run", 2, *keys).wait()
    assert done.returncode == 1 and re.search("WorkerLost: collector rank [01] is lost", done.output)
    assert "Traceback" not in done.output, done.output
