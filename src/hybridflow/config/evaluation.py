"""From a recipe and overrides to the configuration of an evaluation, which generates and trains nothing.

The keys are those of a run: its validation data (`data.val_files`, `data.task`, `data.environment`), its
validation sampling (`rollout.val_kwargs`), its engine, its agents, its rewards. Those of training are left
out, so that a run's own config.yaml is a recipe here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridflow.config.checks.root import check
from hybridflow.config.load import load_config
from hybridflow.config.needs import has_validation
from hybridflow.config.resolve import resolve
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import with_values
from hybridflow.errors import ConfigError

NO_LIMIT = 2**31
"""Tokens of a micro-batch in training, where there is none."""
TRAINER_KEYS = (
    "project_name",
    "experiment_name",
    "default_local_dir",
    "nnodes",
    "n_gpus_per_node",
    "device",
    "num_threads",
    "controller",
    "worker_timeout",
    "heartbeat_timeout",
    "startup_timeout",
    "seed",
)
"""Keys of `trainer` that an evaluation reads."""


def prepare_evaluation(
    overrides: Sequence[str],
    recipe: str | Path | None = None,
    *,
    n: int | None = None,
    runs: bool = True,
    needs_model: bool = True,
) -> tuple[PPOConfig, list[str]]:
    """Return the resolved and checked configuration of an evaluation, and notes on keys that were rewritten.

    `n` answers are wanted to each prompt, sampled if more than one; None: as the keys say. `runs` and
    `needs_model` are those of `config.checks.root.check`. Raises ConfigError that lists every
    problem.
    """
    loaded = load_config(PPOConfig, overrides, recipe)
    given = loaded.config
    if not has_validation(given) and not given.data.environment:
        raise ConfigError(
            "there is nothing to answer: set data.val_files to parquet, json or jsonl files, data.task.name "
            "to a task, or --environment, or name a --recipe with one of them"
        )
    val = given.actor_rollout_ref.rollout.val_kwargs
    if n is not None:
        val = replace(val, n=n)
        if n > 1 and not val.do_sample:
            val = replace(val, do_sample=True, temperature=val.temperature or 1.0)
    if val.n > 1 and not val.do_sample:
        raise ConfigError(
            f"{val.n} greedy answers to a prompt would all be the same: set "
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true and val_kwargs.temperature above 0, or ask "
            "for one answer"
        )
    nothing = PPOConfig()
    config = replace(
        nothing,
        data=replace(
            given.data,
            train_files=given.data.val_files,  # where there are none, an environment makes its own rows
            sampler=nothing.data.sampler,
            train_batch_size=nothing.data.train_batch_size,
            gen_batch_size=None,
        ),
        actor_rollout_ref=replace(
            nothing.actor_rollout_ref,
            model=given.actor_rollout_ref.model,
            rollout=replace(
                given.actor_rollout_ref.rollout, val_kwargs=val, log_prob_max_token_len_per_gpu=None
            ),
        ),
        reward=replace(given.reward, process_reward_model=nothing.reward.process_reward_model),
        trainer=replace(nothing.trainer, **{key: getattr(given.trainer, key) for key in TRAINER_KEYS}),
        ray_kwargs=given.ray_kwargs,
    )
    actor = "actor_rollout_ref.actor"
    trained = given.actor_rollout_ref.actor
    most = given.reward.reward_model.forward_max_token_len_per_gpu or trained.ppo_max_token_len_per_gpu
    config = with_values(
        config,
        {
            f"{actor}.ppo_max_token_len_per_gpu": NO_LIMIT,
            f"{actor}.fsdp_config.mixed_precision": trained.fsdp_config.mixed_precision,
            "reward.reward_model.forward_max_token_len_per_gpu": most,
        },
    )
    resolved = with_values(resolve(config)[0], {"data.train_files": [], "data.task.size": 0})
    check(resolved, runs=runs, needs_model=needs_model, trains=False)
    return resolved, loaded.notes
