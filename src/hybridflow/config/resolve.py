"""Fill the nulls that follow from other keys, so that the code behind reads definite values.

    Loaded.config, the paths the user set ──resolve──► the same dataclasses without nulls that mean "as
    elsewhere", and notes

Left null on purpose: what needs the data (val_batch_size, total_training_steps) or the machine (num_threads),
limits that are off, and `loss_agg_mode` of a user's own loss. `trainer.device=auto` and `dtype=auto` are
decided where torch is.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, TypeVar

from hybridflow.config.checks.cluster import resolved_controller
from hybridflow.config.needs import estimator_facts, is_given, loss_facts
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.tree import with_values

C = TypeVar("C", bound=PPOConfig | SFTConfig)
CACHE = "~/.cache/hybridflow"
ACTOR = "actor_rollout_ref.actor"


def resolve(config: C, given: Set[str] = frozenset()) -> tuple[C, list[str]]:
    """Return the configuration with derived values filled in, and one line for each that may surprise.

    `given` are the paths that the user set.
    """
    if isinstance(config, PPOConfig):
        loss, said = _bypass_loss(config)
        config = with_values(config, loss)
        values, notes = _ppo(config, given)
        return with_values(config, values), [*said, *notes]
    return with_values(config, _sft(config)), []


def _bypass_loss(config: PPOConfig) -> tuple[dict[str, Any], list[str]]:
    """In bypass mode `loss_type=reinforce` is the policy loss."""
    correction = config.algorithm.rollout_correction
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode or correction.loss_type != "reinforce" or loss == "reinforce":
        return {}, []
    path = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return {path: "reinforce"}, [
        f"{path}=reinforce: what algorithm.rollout_correction.loss_type asks for in bypass mode (it was "
        f"{loss})"
    ]


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


def _sft(config: SFTConfig) -> dict[str, Any]:
    tokenizer = config.model.tokenizer_path or config.model.path
    return _shared(config) | {
        "data.tokenizer": config.data.tokenizer or tokenizer,
        "model.tokenizer_path": tokenizer,
    }


def _ppo(config: PPOConfig, given: Set[str]) -> tuple[dict[str, Any], list[str]]:
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    ref = config.actor_rollout_ref.ref
    model = config.actor_rollout_ref.model
    data = config.data
    notes: list[str] = []
    mini = actor.ppo_mini_batch_size
    if mini > data.train_batch_size and "actor_rollout_ref.actor.ppo_mini_batch_size" not in given:
        notes.append(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={data.train_batch_size} (its default {mini} is "
            "more than data.train_batch_size)"
        )
        mini = data.train_batch_size
    loss = loss_facts(config)
    cap = actor.ppo_max_token_len_per_gpu
    values = _shared(config) | {
        "data.tokenizer": data.tokenizer or model.tokenizer_path or model.path,
        "data.gen_batch_size": data.gen_batch_size or data.train_batch_size,
        "data.seed": config.trainer.seed if data.seed is None else data.seed,
        "actor_rollout_ref.model.tokenizer_path": model.tokenizer_path or model.path,
        "actor_rollout_ref.actor.strategy": "fsdp2" if actor.strategy == "fsdp" else actor.strategy,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.loss_agg_mode": actor.loss_agg_mode or (loss.agg_mode if loss else None),
        "actor_rollout_ref.actor.loss_scale_factor": actor.loss_scale_factor
        or float(data.max_response_length),
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu
        or cap,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": ref.log_prob_max_token_len_per_gpu or cap,
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size": ref.ulysses_sequence_parallel_size
        or actor.ulysses_sequence_parallel_size,
        "distillation.log_prob_max_token_len_per_gpu": config.distillation.log_prob_max_token_len_per_gpu
        or cap,
        "reward.reward_kwargs.max_resp_len": config.reward.reward_kwargs.max_resp_len
        or data.max_response_length,
    }
    longest, overlong = (
        values["reward.reward_kwargs.max_resp_len"],
        "reward.reward_kwargs.overlong_buffer_cfg.len",
    )
    # DAPO's part: 4096 of 20480 tokens
    values[overlong] = config.reward.reward_kwargs.overlong_buffer_cfg.len or max(1, longest // 5)
    if rollout.name in ("vllm", "sglang"):
        values["actor_rollout_ref.rollout.max_model_len"] = (
            rollout.max_model_len or data.max_prompt_length + data.max_response_length
        )
    values |= _clip_bounds(config, given, notes)
    values |= _largest_ratio(config, given, notes)
    values |= _followed_model(
        config, "distillation.teacher_model", config.distillation.teacher_model.path, given
    )
    return values | _critic(config, mini, given) | _process_reward_model(config, given), notes


def _clip_bounds(config: PPOConfig, given: Set[str], notes: list[str]) -> dict[str, Any]:
    """Clip bounds of the loss's paper on each side that the user left out, so that those shown hold."""
    actor = config.actor_rollout_ref.actor
    loss = loss_facts(config)
    if loss is None or loss.clip is None:
        return {}
    own = {
        side: bool({f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_{side}"} & given) for side in ("low", "high")
    }
    low, high = loss.clip
    if own["low"]:
        low = actor.clip_low
    if own["high"]:
        high = actor.clip_high
    filled = [f"clip_ratio_{side}={bound}" for side, bound in (("low", low), ("high", high)) if not own[side]]
    if filled:
        notes.append(
            f"{ACTOR}.{', '.join(filled)}: what {actor.policy_loss.loss_mode} has where none is given"
        )
    return {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}


def _largest_ratio(config: PPOConfig, given: Set[str], notes: list[str]) -> dict[str, Any]:
    """The loss's own `clip_ratio_c` where the user left it out."""
    loss, path = loss_facts(config), f"{ACTOR}.clip_ratio_c"
    if loss is None or loss.clip_c is None or path in given:
        return {}
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    notes.append(f"{path}={loss.clip_c}: what {mode} has where none is given")
    return {path: loss.clip_c}


def _critic(config: PPOConfig, mini: int, given: Set[str]) -> dict[str, Any]:
    critic = config.critic
    model = config.actor_rollout_ref.model
    actor = config.actor_rollout_ref.actor
    facts = estimator_facts(config)
    values: dict[str, Any] = {
        "critic.enable": (facts is not None and facts.critic) if critic.enable is None else critic.enable,
        "critic.model.path": critic.model.path or model.path,
        "critic.ppo_mini_batch_size": critic.ppo_mini_batch_size or mini,
        "critic.ppo_epochs": critic.ppo_epochs or actor.ppo_epochs,
        "critic.shuffle": actor.shuffle if critic.shuffle is None else critic.shuffle,
        "critic.forward_micro_batch_size_per_gpu": critic.forward_micro_batch_size_per_gpu
        or critic.ppo_micro_batch_size_per_gpu,
        "critic.forward_max_token_len_per_gpu": critic.forward_max_token_len_per_gpu
        or critic.ppo_max_token_len_per_gpu,
    }
    return values | _followed_model(config, "critic.model", values["critic.model.path"], given)


def _process_reward_model(config: PPOConfig, given: Set[str]) -> dict[str, Any]:
    process = config.reward.process_reward_model
    facts = estimator_facts(config)
    path = "reward.process_reward_model"
    cap = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    values: dict[str, Any] = {
        f"{path}.enable": (facts is not None and facts.process_rewards)
        if process.enable is None
        else process.enable,
        f"{path}.model.path": process.model.path or config.actor_rollout_ref.model.path,
        f"{path}.ppo_mini_batch_size": process.ppo_mini_batch_size or config.data.train_batch_size,
        f"{path}.ppo_max_token_len_per_gpu": process.ppo_max_token_len_per_gpu or cap,
    }
    return values | _followed_model(config, f"{path}.model", values[f"{path}.model.path"], given)


def _followed_model(config: PPOConfig, block: str, path: str | None, given: Set[str]) -> dict[str, Any]:
    """Keys that a role's model takes over from the actor's, since both read the same tokens. Where the
    weights are the same too, so is override_config.
    """
    model = config.actor_rollout_ref.model
    followed: dict[str, Any] = {
        "tokenizer_path": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "external_lib": model.external_lib,
        "dtype": model.dtype,
    }
    if path == model.path:
        followed["override_config"] = model.override_config
    return {
        f"{block}.{name}": value for name, value in followed.items() if not is_given(f"{block}.{name}", given)
    }


def _as_list(value: str | Sequence[str]) -> list[str]:
    return ([value] if value else []) if isinstance(value, str) else list(value)
