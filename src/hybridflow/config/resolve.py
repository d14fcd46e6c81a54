"""Fill the nulls that follow from other keys, so that the code behind reads definite values.

    Loaded.config, the paths the user set ──resolve──► the same dataclasses without such nulls, and notes

Left null on purpose: what needs the data (val_batch_size, total_training_steps) or the machine (num_threads),
limits that are off, and `loss_agg_mode` of a user's own loss. `trainer.device=auto` and `dtype=auto` are
decided where torch is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeVar

from hybridflow.config.layout import resolved_controller
from hybridflow.config.needs import estimator_facts, is_given, loss_facts
from hybridflow.config.reward import MODEL_TERM
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.config.tree import get_value, with_values

C = TypeVar("C", bound=PPOConfig | SFTConfig)
CACHE = "~/.cache/hybridflow"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
PROCESS = "reward.process_reward_model"
MODEL = "reward.reward_model"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg.len"
PPO_FOLLOWS = {
    "actor_rollout_ref.model.tokenizer_path": "actor_rollout_ref.model.path",
    "data.tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "data.gen_batch_size": "data.train_batch_size",
    "data.seed": "trainer.seed",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{REF}.model.path": "actor_rollout_ref.model.path",
    "distillation.log_prob_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
    f"{MODEL}.forward_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{MODEL}.max_length": f"{MODEL}.forward_max_token_len_per_gpu",
    "critic.model.path": "actor_rollout_ref.model.path",
    "critic.ppo_mini_batch_size": f"{ACTOR}.ppo_mini_batch_size",
    "critic.ppo_epochs": f"{ACTOR}.ppo_epochs",
    "critic.shuffle": f"{ACTOR}.shuffle",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    f"{PROCESS}.model.path": "actor_rollout_ref.model.path",
    f"{PROCESS}.ppo_mini_batch_size": "data.train_batch_size",
    f"{PROCESS}.ppo_max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
}
"""Keys that, while they are null, have the value of another key, which is not below them."""
SFT_FOLLOWS = {"model.tokenizer_path": "model.path", "data.tokenizer": "model.tokenizer_path"}


def resolve(config: C, given: Set[str] = frozenset()) -> tuple[C, list[str]]:
    """Return the configuration with derived values filled in, and one line for each that may surprise.

    `given` are the paths that the user set.
    """
    config = with_values(config, _shared(config))
    if isinstance(config, SFTConfig):
        return _followed(config, SFT_FOLLOWS), []
    notes: list[str] = []
    config = with_values(config, _bypass_loss(config, notes))
    config = with_values(config, _environment_rows(config))
    config = with_values(config, _model_reward(config))
    config = with_values(config, _mini_batch(config, given, notes))
    config = with_values(config, _schedule(config, given))
    config = _followed(config, PPO_FOLLOWS)
    notes += _engine(config)
    values = _ppo(config) | _paper_bounds(config, given, notes)
    for block in ("distillation.teacher_model", "critic.model", f"{PROCESS}.model", f"{REF}.model"):
        values |= _followed_model(config, block, given)
    return with_values(config, values), notes


def _followed(config: C, follows: Mapping[str, str]) -> C:
    """Return the configuration in which each null has the value of the key that it follows."""
    for key, other in follows.items():
        if get_value(config, key) in (None, ""):
            config = with_values(config, {key: get_value(config, other)})
    return config


def _bypass_loss(config: PPOConfig, notes: list[str]) -> dict[str, Any]:
    """In bypass mode `loss_type=reinforce` is the policy loss."""
    correction = config.algorithm.rollout_correction
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode or correction.loss_type != "reinforce" or loss == "reinforce":
        return {}
    path = f"{ACTOR}.policy_loss.loss_mode"
    notes.append(
        f"{path}=reinforce: what algorithm.rollout_correction.loss_type asks for in bypass mode (it was "
        f"{loss})"
    )
    return {path: "reinforce"}


def _environment_rows(config: PPOConfig) -> dict[str, Any]:
    """An environment without data makes its own questions."""
    data = config.data
    if not data.environment or data.train_files or data.task.name or data.custom_cls.path:
        return {}
    return {"data.task.name": f"environment:{data.environment}"}


def _model_reward(config: PPOConfig) -> dict[str, Any]:
    """A reward model beside no chosen function is the whole reward."""
    reward = config.reward
    chosen = reward.terms or reward.custom_reward_function.path or reward.function != "auto"
    if chosen or not reward.reward_model.enable:
        return {}
    return {"reward.terms": [{"name": MODEL_TERM}]}


def _shared(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    data = config.data
    trainer = config.trainer
    return {
        "data.train_files": _as_list(data.train_files),
        "data.val_files": _as_list(data.val_files),
        "data.cache_dir": data.cache_dir or CACHE,
        "trainer.logger": _as_list(trainer.logger),
        "trainer.controller": resolved_controller(trainer),
    }


def _schedule(config: PPOConfig, given: Set[str]) -> dict[str, Any]:
    """How far generation runs ahead and how old a token may be, where the user left them out.

    Under sync both are 0. An exact schedule knows how old its tokens are; the others may wait three times as
    long for a slow group as they run ahead.
    """
    keys = config.trainer.async_
    schedule = config.trainer.schedule
    values: dict[str, Any] = {}
    ahead = keys.run_ahead
    if schedule == "sync" and "trainer.async.run_ahead" not in given:
        ahead = 0.0
    values["trainer.async.run_ahead"] = ahead
    if keys.max_staleness is None and math.isfinite(ahead):
        times = 1 if schedule in EXACT_SCHEDULES else 3
        if schedule == "sync":
            times = 0
        values["trainer.async.max_staleness"] = math.ceil(times * ahead)
    return values


def _mini_batch(config: PPOConfig, given: Set[str], notes: list[str]) -> dict[str, Any]:
    """The default mini-batch, cut to the batch."""
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    batch = config.data.train_batch_size
    path = f"{ACTOR}.ppo_mini_batch_size"
    if mini <= batch or path in given:
        return {}
    notes.append(f"{path}={batch} (its default {mini} is more than data.train_batch_size)")
    return {path: batch}


def _engine(config: PPOConfig) -> list[str]:
    """Return the line that names the engine of a run that asks for Megatron-LM."""
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return []
    return [
        f"{ACTOR}.strategy=megatron: the sizes of its block are those of fsdp_config, and run by PyTorch's "
        "own engine (FSDP2, tensor parallelism, stages by 1F1B), not Megatron-LM"
    ]


def _ppo(config: PPOConfig) -> dict[str, Any]:
    """Values that are not simply those of another key."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    kwargs = config.reward.reward_kwargs
    process = config.reward.process_reward_model
    estimator = estimator_facts(config)
    loss = loss_facts(config)
    longest = kwargs.max_resp_len or config.data.max_response_length
    values: dict[str, Any] = {
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.loss_scale_factor": actor.loss_scale_factor or float(config.data.max_response_length),
        # DAPO's part: 4096 of 20480 tokens
        OVERLONG: kwargs.overlong_buffer_cfg.len or max(1, longest // 5),
    }
    if actor.loss_agg_mode is None and loss is not None:
        values[f"{ACTOR}.loss_agg_mode"] = loss.agg_mode
    if config.critic.enable is None:
        values["critic.enable"] = estimator is not None and estimator.critic
    if process.enable is None:
        values[f"{PROCESS}.enable"] = estimator is not None and estimator.process_rewards
    if rollout.name in ("vllm", "sglang") and rollout.max_model_len is None:
        values[f"{ROLLOUT}.max_model_len"] = config.data.max_prompt_length + config.data.max_response_length
    return values


def _paper_bounds(config: PPOConfig, given: Set[str], notes: list[str]) -> dict[str, Any]:
    """Clip bounds and largest ratio of the loss's paper where the user left them out."""
    actor = config.actor_rollout_ref.actor
    loss = loss_facts(config)
    values: dict[str, float] = {}
    left_out: dict[str, float] = {}
    if loss is not None and loss.clip is not None:
        values = {"clip_ratio_low": actor.clip_low, "clip_ratio_high": actor.clip_high}
        for name, bound in zip(values, loss.clip, strict=True):
            if not {f"{ACTOR}.clip_ratio", f"{ACTOR}.{name}"} & given:
                left_out[name] = bound
    if loss is not None and loss.clip_c is not None and f"{ACTOR}.clip_ratio_c" not in given:
        left_out["clip_ratio_c"] = loss.clip_c
    if left_out:
        shown = ", ".join(f"{name}={bound}" for name, bound in left_out.items())
        notes.append(f"{ACTOR}.{shown}: what {actor.policy_loss.loss_mode} has where none is given")
    return {f"{ACTOR}.{name}": bound for name, bound in (values | left_out).items()}


def _followed_model(config: PPOConfig, block: str, given: Set[str]) -> dict[str, Any]:
    """Keys that a role's model takes over from the actor's, since both read the same tokens. Where the
    weights are the same too, so is override_config.
    """
    model = config.actor_rollout_ref.model
    followed: dict[str, Any] = {
        "tokenizer_path": model.tokenizer_path,
        "trust_remote_code": model.trust_remote_code,
        "external_lib": model.external_lib,
        "dtype": model.dtype,
    }
    if get_value(config, block).path == model.path:
        followed["override_config"] = model.override_config
    if block == f"{REF}.model":
        followed["use_liger"] = model.use_liger
        if get_value(config, block).path != model.path:
            followed["tokenizer_path"] = None  # its own, which must have the actor's tokens
    return {
        f"{block}.{name}": value for name, value in followed.items() if not is_given(f"{block}.{name}", given)
    }


def _as_list(value: str | Sequence[str]) -> list[str]:
    return ([value] if value else []) if isinstance(value, str) else list(value)
