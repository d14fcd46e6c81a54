"""Configurations of runs of a second on a tiny model, with a reward that differs from row to row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import PPOTrainer, build

TIMINGS = (
    "timing_s/",
    "fully_async/",
    "perf/throughput",
    "perf/time_per_step",
    "perf/predicted/",
    "perf/peak_memory",
    "perf/rollout_tokens_per_second",
    "reward/seconds",
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    share = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
    return {"score": share + 0.01 * len(solution_str), "share": share, "pred": solution_str[:1]}
"""


def tiny_model(folder: Path, **changes: Any) -> Path:
    return create_tiny_model(
        folder, **{"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 48, **changes}
    )


def ppo_config(model: Path, run: Path, *overrides: str) -> PPOConfig:
    """Four prompts of two responses a step, two optimizer steps each, two steps; later `overrides` win."""
    reward = run.parent / "reward.py"
    reward.write_text(REWARD)
    settings = [
        f"actor_rollout_ref.model.path='{model}'",
        "data.task.name=arithmetic_chain",
        "data.task.size=64",
        "data.task.val_size=5",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=10",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "critic.optim.lr=1e-2",
        "actor_rollout_ref.rollout.n=2",
        "reward.num_workers=0",
        f"reward.custom_reward_function.path='{reward}'",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=100",  # at the end
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir='{run}'",
    ]
    return prepare_config(PPOConfig, [*settings, *overrides]).config


def sft_config(model: Path, run: Path, *overrides: str) -> SFTConfig:
    settings = [
        f"model.path='{model}'",
        "data.task.name=arithmetic_chain",
        "data.task.size=32",
        "data.task.val_size=6",
        "data.train_batch_size=8",
        "optim.lr=1e-2",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir='{run}'",
    ]
    return prepare_config(SFTConfig, [*settings, *overrides]).config


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    """What each step of a run has logged, without what the clock decides."""
    return {
        step: {name: value for name, value in line.items() if not name.startswith(TIMINGS)}
        for step, line in read_metrics(run / "metrics.jsonl").items()
    }


def trained_steps(run: Path) -> list[dict[str, float]]:
    """All that the steps of a run that updated the actor have logged."""
    return [line for line in read_metrics(run / "metrics.jsonl").values() if "actor/num_updates" in line]


def actor_module(trainer: PPOTrainer) -> Any:
    """The module that trains."""
    return trainer.step.roles.actor.backend.worker("actor").engine.module  # type: ignore[attr-defined]


__all__ = [
    "TIMINGS",
    "actor_module",
    "build",
    "metrics_of",
    "ppo_config",
    "sft_config",
    "tiny_model",
    "trained_steps",
]
