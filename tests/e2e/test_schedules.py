"""Schedules with generation in processes of its own: the exact ones give the same numbers whatever the timing
and however many workers generate; the continuous one accounts for every group.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_resume import STEPS, differences
from ray_runs import OF_EACH_PROCESS, under_ray
from tiny_run import Inputs, metrics_of, small_run

from hybridflow.trainer.main_ppo import main
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger, surviving_transitions
from hybridflow.trainer.schedules.ledger_state import Replayed

KEYS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.save_freq=2",
    "trainer.test_freq=3",
)
OF_ITS_OWN = ("data/", "actor/huggingface/")
"""Files of a checkpoint that depend on the process: the ledger has its lines in the order of events, and the
tokenizer is written as this process has loaded it.
"""
SLOW_REWARD = '''"""The reward of the other tests, which takes a random time."""
import random
import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(random.uniform(0.0, 0.1))
    return sum(c.isdigit() or c == " " for c in solution_str) / max(1, len(solution_str))
'''


def beside_training(folder: Path, arguments: list[str], *, workers: int) -> None:
    """Run with `workers` that generate beside training, each step of which takes a random time."""
    reward = folder / "slow_reward.py"
    reward.write_text(SLOW_REWARD)
    keys = (
        f"trainer.resource_pools={{train: [1], generate: [{workers}]}}",
        "trainer.controller=ray",
        "trainer.placement={rollout: generate}",
        "actor_rollout_ref.model.external_lib=random_sleeps",
        f"reward.custom_reward_function.path={reward}",
        "reward.num_workers=2",
    )
    done = under_ray(folder / "log", [*arguments, *keys], cpus=workers + 1).wait()
    assert done.returncode == 0, done.output


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("ahead", "workers"),
    [(0, 1), (1, 2), (1, 4), (2, 2)],
    ids=lambda number: str(number),
)
def test_timing_and_number_of_workers_change_nothing(
    inputs: Inputs, tmp_path: Path, ahead: int, workers: int
) -> None:
    keys = [f"data.val_files={inputs.val}", *KEYS, "trainer.schedule=exact_async"]
    keys.append(f"trainer.async.run_ahead={ahead}")
    assert main(small_run(inputs, tmp_path / "one", *keys, steps=STEPS)) == 0
    beside_training(tmp_path, small_run(inputs, tmp_path / "many", *keys, steps=STEPS), workers=workers)
    ignored = (*OF_EACH_PROCESS, "reward/", "rollout/")
    assert not differences(tmp_path / "many", tmp_path / "one", ignored, last_files_without=OF_ITS_OWN)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ray")
def test_a_replay_buffer_has_the_same_bits_under_ray(inputs: Inputs, tmp_path: Path) -> None:
    """Tokens of earlier steps stay in Ray's object store, and the ledger has the same draws."""
    keys = [f"data.val_files={inputs.val}", *KEYS, "trainer.schedule=one_step_off"]
    keys += ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo.max_age=2"]
    assert main(small_run(inputs, tmp_path / "one", *keys, steps=STEPS)) == 0
    many = small_run(inputs, tmp_path / "many", *keys, steps=STEPS)
    beside_training(tmp_path, many, workers=1)
    ignored = (*OF_EACH_PROCESS, "reward/", "rollout/")
    assert not differences(tmp_path / "many", tmp_path / "one", ignored, last_files_without=OF_ITS_OWN)
    draws = [
        [line for _, line in surviving_transitions(run / LEDGER_FILE) if isinstance(line, Replayed)]
        for run in (tmp_path / "one", tmp_path / "many")
    ]
    assert draws[0] == draws[1] and {line.step for line in draws[0]} == {*range(1, STEPS)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ray")
def test_nothing_ahead_is_the_synchronous_run_beside_training_too(inputs: Inputs, tmp_path: Path) -> None:
    keys = [f"data.val_files={inputs.val}", *KEYS]
    ahead = ["trainer.schedule=fully_async", "trainer.async.run_ahead=0"]
    assert main(small_run(inputs, tmp_path / "one", *keys, steps=STEPS)) == 0
    many = small_run(inputs, tmp_path / "many", *keys, *ahead, steps=STEPS)
    beside_training(tmp_path, many, workers=2)
    ignored = (*OF_EACH_PROCESS, "reward/", "rollout/", "training/num_gen_batches")
    assert not differences(tmp_path / "many", tmp_path / "one", ignored, last_files_without=OF_ITS_OWN)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ray")
def test_a_run_without_a_pause_accounts_for_every_group_and_holds_its_bound(
    inputs: Inputs, tmp_path: Path
) -> None:
    ahead = ["trainer.schedule=fully_async", "trainer.async.run_ahead=1.5", "trainer.async.max_staleness=3"]
    many = small_run(inputs, tmp_path / "many", *KEYS, *ahead, steps=STEPS)
    beside_training(tmp_path, many, workers=2)
    with Ledger(tmp_path / "many" / LEDGER_FILE) as ledger:
        state = ledger.state
    assert state.trained_per_step == [4] * STEPS and state.num_admitted == 4 * STEPS
    name = "training/off_policy/trajectory_staleness_worst/max"
    stalest = [values.get(name, 0.0) for values in metrics_of(tmp_path / "many").values()]
    assert 0 < max(stalest) <= 3
