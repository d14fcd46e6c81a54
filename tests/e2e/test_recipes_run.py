"""Every recipe of the tiny task runs as it is: two small steps, with finite numbers and an update."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.recipes import COMPARISONS, FOLDER
from hybridflow.models.tiny import create_tiny_model
from hybridflow.trainer.main_ppo import run

TINY = sorted((FOLDER / "tiny").glob("*.yaml"))
NAMES = [path.stem for path in TINY if (FOLDER / path.name).is_file() and path.stem not in COMPARISONS]
ENVIRONMENTS = ("calculator", "guess", "search")
SMALL = (
    "data.task.size=64",
    "data.task.val_size=4",
    "data.train_batch_size=4",
    "data.gen_batch_size=null",
    "data.max_response_length=6",
    # scores that differ inside a group, so that each algorithm has something to learn
    "reward.function=random",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.exact=false",  # whether it can hold is asked of each model, not of a recipe
    "trainer.total_training_steps=2",
    "trainer.critic_warmup=0",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[]",
    "trainer.val_before_train=false",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("model"), hidden=32, intermediate=48, heads=2, kv_heads=1
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name: str, model: Path, tmp_path: Path) -> None:
    own = {
        "on_policy_distillation": [f"distillation.teacher_model.path='{model}'"],
        "gdpo": ["reward.function=auto", f"reward.custom_reward_function.path='{_two_rewards(tmp_path)}'"],
        "dapo": [
            "algorithm.filter_groups.metric=score",
            "algorithm.overlong_filtering=false",  # six tokens are all cut off
            "reward.reward_kwargs.overlong_buffer_cfg.len=2",
        ],
        "prime": ["algorithm.filter_groups.metric=score"],
        "spin": ["data.max_response_length=48"],  # the data's own answers must fit
    }.get(name, [])
    settings = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{tmp_path / 'run'}'",
        *SMALL,
        *own,
    ]
    steps = steps_of(settings, name, tmp_path)
    # the teacher here is the student: nothing to learn at the first step
    if name != "on_policy_distillation":
        assert steps[0]["actor/grad_norm"] > 0


def test_two_steps_of_a_mixture_of_experts(tmp_path: Path) -> None:
    experts = create_tiny_model(
        tmp_path / "model", hidden=32, intermediate=48, heads=2, kv_heads=1, experts=4
    )
    run_folder = tmp_path / "run"
    settings = [
        f"actor_rollout_ref.model.path='{experts}'",
        f"trainer.default_local_dir='{run_folder}'",
        *SMALL,
    ]
    for step in steps_of(settings, "moe", tmp_path):
        assert step["actor/grad_norm"] > 0 and step["actor/moe/without_route"] > 0


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_two_steps_with_an_environment(name: str, model: Path, tmp_path: Path) -> None:
    """A model with random weights earns nothing there, so that only the way is tried."""
    settings = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{tmp_path / 'run'}'",
        *(setting for setting in SMALL if not setting.startswith("reward.")),
    ]
    for step in steps_of(settings, name, tmp_path):
        assert step["agent/num_turns/mean"] >= 1 and "training/num_failed/environment" not in step


def steps_of(settings: list[str], name: str, folder: Path) -> list[dict[str, float]]:
    """Run a tiny recipe; return the metrics of its two steps, which are sound."""
    run(prepare_config(PPOConfig, settings, recipe=f"tiny/{name}").config)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "actor/num_updates" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["actor/num_updates"] >= 1 and step["actor/num_skipped_steps"] == 0
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float))
    return steps


def _two_rewards(folder: Path) -> Path:
    path = folder / "two_rewards.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(len(solution_str)), 'acc': float(len(solution_str) % 2), 'format': "
        "float('=' in solution_str)}\n"
    )
    return path
