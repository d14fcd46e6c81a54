"""Fills the nulls that follow from other keys, so that all later code reads definite values.

    Loaded.config, the paths the user set ──resolve──► the same dataclasses without such nulls, and notes

Left null on purpose: what needs the data (val_batch_size, total_training_steps) or the machine (num_threads),
limits that are off, and `loss_agg_mode` of a user's own loss. `trainer.device=auto` and `dtype=auto` are
decided where torch is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeVar

from hybridflow.config.convert import WRONG, WrongKeyRead
from hybridflow.config.layout import VALIDATION, resolved_controller
from hybridflow.config.megatron import SHARDING, TORCH, megatron_serves
from hybridflow.config.needs import estimator_facts, is_given, loss_facts
from hybridflow.config.reward import JUDGE_TERM, MODEL_TERM, has_judge
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.config.tree import get_value, with_values

C = TypeVar("C", bound=PPOConfig | SFTConfig)
CACHE = "~/.cache/hybridflow"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
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
FOLLOWED_OF_MODELS = (
    "tokenizer_path",
    "trust_remote_code",
    "external_lib",
    "dtype",
    "override_config",
    "use_liger",
)
SFT_FOLLOWS = {"model.tokenizer_path": "model.path", "data.tokenizer": "model.tokenizer_path"}


Values = dict[str, Any]
Fill = Callable[[Any, Set[str], list[str]], Values]
"""Function of the configuration, the keys that the user set and the notes: values of the keys of its step."""


def resolve(config: C, given: Set[str] = frozenset()) -> tuple[C, list[str]]:
    """Return the configuration with derived values filled in, and one line for each that may surprise.

    `given` are the paths that the user set. What follows from a wrong key is wrong itself.
    """
    notes: list[str] = []
    for keys, fill in PPO if isinstance(config, PPOConfig) else SUPERVISED:
        try:
            values = fill(config, given, notes)
        except WrongKeyRead:
            values = dict.fromkeys(keys, WRONG)
        config = with_values(config, values)
    return config, notes


def follows_of(config: PPOConfig | SFTConfig) -> Mapping[str, str]:
    """Return the keys of this kind of run that have the value of another key where they are left out."""
    liger = {f"{REF}.model.use_liger": "actor_rollout_ref.model.use_liger"}
    return {**PPO_FOLLOWS, **liger} if isinstance(config, PPOConfig) else SFT_FOLLOWS


def _validation_pool(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """A pool for the replica that validates beside training, where the keys name none; the checks judge one
    that is named `validation` already.
    """
    trainer = config.trainer
    if not trainer.val_in_background or VALIDATION in trainer.placement or trainer.controller == "local":
        return {}
    placement = {"trainer.placement": {**trainer.placement, VALIDATION: VALIDATION}}
    if VALIDATION in trainer.resource_pools:
        return placement
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    others = trainer.resource_pools or {"train": [trainer.n_gpus_per_node] * trainer.nnodes}
    pools = {**others, VALIDATION: [width]}
    notes.append(
        f"trainer.resource_pools={pools}: what was asked for, and {width} more for trainer.val_in_background"
    )
    return {"trainer.resource_pools": pools, **placement}


def _bypass_loss(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """In bypass mode `loss_type=reinforce` is the policy loss."""
    correction = config.algorithm.rollout_correction
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode or correction.loss_type != "reinforce" or loss == "reinforce":
        return {}
    notes.append(
        f"{LOSS}=reinforce: what algorithm.rollout_correction.loss_type asks for in bypass mode (it was "
        f"{loss})"
    )
    return {LOSS: "reinforce"}


def _environment_rows(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """An environment without data makes its own questions."""
    data = config.data
    if not data.environment or data.train_files or data.task.name or data.custom_cls.path:
        return {}
    return {"data.task.name": f"environment:{data.environment}"}


def _model_kind(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """A reward model beside a function of the user's, which verl would give its address, generates."""
    key = f"{MODEL}.kind"
    reward = config.reward
    if not reward.reward_model.enable or not reward.custom_reward_function.path or key in given:
        return {}
    notes.append(f"{key}=generative: reward.custom_reward_function.path asks the reward model itself")
    return {key: "generative"}


def _judge_engine(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """The native engine in the place of those that verl serves a reward model with."""
    key = f"{MODEL}.rollout.name"
    name = config.reward.reward_model.rollout.name
    if name in ("native", "hf"):
        return {}
    if has_judge(config.reward):
        notes.append(f"{key}=native: the run starts its judge in this engine, and none in {name}")
    return {key: "native"}


def _model_reward(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """A reward model beside no chosen function is the whole reward."""
    reward = config.reward
    chosen = reward.terms or reward.custom_reward_function.path or reward.function != "auto"
    if chosen or not reward.reward_model.enable:
        return {}
    return {"reward.terms": [{"name": JUDGE_TERM if has_judge(reward) else MODEL_TERM}]}


def _run_ahead(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """How far generation runs ahead: under sync not at all, where the user left it out."""
    if config.trainer.schedule == "sync" and "trainer.async.run_ahead" not in given:
        return {"trainer.async.run_ahead": 0.0}
    return {}


def _max_staleness(config: PPOConfig) -> int | None:
    """How old a token may be: under sync 0. An exact schedule knows how old its tokens are; the others may
    wait three times as long for a slow group as they run ahead.
    """
    schedule = config.trainer.schedule
    ahead = config.trainer.async_.run_ahead
    if schedule == "sync":
        return 0
    if not math.isfinite(ahead):
        return None
    return math.ceil(ahead if schedule in EXACT_SCHEDULES else 3 * ahead)


def _mini_batch(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """The default mini-batch, cut to the batch."""
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    batch = config.data.train_batch_size
    path = f"{ACTOR}.ppo_mini_batch_size"
    if mini <= batch or path in given:
        return {}
    notes.append(f"{path}={batch} (its default {mini} is more than data.train_batch_size)")
    return {path: batch}


def _engine(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """Choose the engine, megatron-core or PyTorch's; a line says which to those who ask for megatron.

    megatron-core generates with a copy of the weights, whose log-probs are not those of training to the bit.
    """
    values = _strategy(f"{ACTOR}.strategy", config, notes, "actor")
    if values[f"{ACTOR}.strategy"] == "megatron" and config.actor_rollout_ref.rollout.exact == "auto":
        values[f"{ROLLOUT}.exact"] = False
    return values


def _critics_engine(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """Choose the engine of the critic, as `_engine` does, where there is one."""
    if not config.critic.enable:
        return {}
    return _strategy("critic.strategy", config, notes, "critic")


def _supervised_engine(config: SFTConfig, given: Set[str], notes: list[str]) -> Values:
    """Choose the engine of a supervised run, as `_engine` does."""
    return _strategy("engine.strategy", config, notes, "")


def _strategy(key: str, config: PPOConfig | SFTConfig, notes: list[str], role: str) -> Values:
    if get_value(config, key) != "megatron":
        return {key: "fsdp2"}
    why = megatron_serves(config, role)
    if why is not None:
        notes.append(
            f"{key}=megatron: the sizes of its block are those of fsdp_config, and run by {TORCH}, not "
            f"Megatron-LM: {why}"
        )
        return {key: "fsdp2"}
    notes.append(f"{key}=megatron: megatron-core trains, with the sizes of its block")
    # -1: all ranks that its other sizes leave over are one group, in which megatron-core has copies
    return {key: "megatron", **{f"{block}.fsdp_size": -1 for block in SHARDING[key]}}


def _overlong(config: PPOConfig) -> int:
    """DAPO's part of the longest response: 4096 of 20480 tokens."""
    return max(1, (config.reward.reward_kwargs.max_resp_len or config.data.max_response_length) // 5)


def _context(config: PPOConfig) -> int | None:
    if config.actor_rollout_ref.rollout.name not in ("vllm", "sglang"):
        return None
    return config.data.max_prompt_length + config.data.max_response_length


def _paper_bounds(config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
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


def _followed_model(block: str, config: PPOConfig, given: Set[str], notes: list[str]) -> Values:
    """Keys that a role's model takes over from the actor's, since both read the same tokens. Where the
    weights are the same too, so is override_config.
    """
    model = config.actor_rollout_ref.model
    same = get_value(config, block).path == model.path
    followed = {name: getattr(model, name) for name in FOLLOWED_OF_MODELS}
    if not same:
        del followed["override_config"]
    if block != f"{REF}.model":
        del followed["use_liger"]
    elif not same:
        followed["tokenizer_path"] = None  # its own, which must have the actor's tokens
    return {
        f"{block}.{name}": value for name, value in followed.items() if not is_given(f"{block}.{name}", given)
    }


def _set(key: str, value: Callable[[Any], Any]) -> tuple[tuple[str, ...], Fill]:
    """Return the step that gives one key a value that follows from the configuration."""
    return (key,), lambda config, given, notes: {key: value(config)}


def _where_null(key: str, value: Callable[[Any], Any]) -> tuple[tuple[str, ...], Fill]:
    """Return the step that gives one key a value where it is null or empty."""

    def fill(config: Any, given: Set[str], notes: list[str]) -> Values:
        found = get_value(config, key)
        return {key: value(config)} if found is None or found == "" else {}

    return (key,), fill


def _follow(follows: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Fill]]:
    """Yield the step of each key that has the value of another one while it is null."""
    for key, other in follows.items():
        yield _where_null(key, partial(get_value, path=other))


def _as_list(value: str | Sequence[str]) -> list[str]:
    return ([value] if value else []) if isinstance(value, str) else list(value)


MODELS = ("distillation.teacher_model", "critic.model", f"{PROCESS}.model", f"{REF}.model")
Steps = tuple[tuple[tuple[str, ...], Fill], ...]
SHARED: Steps = (
    _set("data.train_files", lambda config: _as_list(config.data.train_files)),
    _set("data.val_files", lambda config: _as_list(config.data.val_files)),
    _where_null("data.cache_dir", lambda config: CACHE),
    _set("trainer.logger", lambda config: _as_list(config.trainer.logger)),
    _set("trainer.controller", lambda config: resolved_controller(config.trainer)),
)
SUPERVISED: Steps = (*SHARED, *_follow(SFT_FOLLOWS), (("engine.strategy",), _supervised_engine))
PPO: Steps = (
    (("trainer.resource_pools", "trainer.placement"), _validation_pool),  # it decides about the controller
    *SHARED,
    ((LOSS,), _bypass_loss),
    (("data.task.name",), _environment_rows),
    ((f"{MODEL}.kind",), _model_kind),
    ((f"{MODEL}.rollout.name",), _judge_engine),
    (("reward.terms",), _model_reward),
    ((f"{ACTOR}.ppo_mini_batch_size",), _mini_batch),
    (("trainer.async.run_ahead",), _run_ahead),
    _where_null("trainer.async.max_staleness", _max_staleness),
    *_follow(PPO_FOLLOWS),
    ((f"{ACTOR}.strategy", f"{ROLLOUT}.exact"), _engine),
    _where_null(f"{ACTOR}.loss_scale_factor", lambda config: float(config.data.max_response_length)),
    _where_null(OVERLONG, _overlong),
    _where_null(f"{ACTOR}.loss_agg_mode", lambda config: getattr(loss_facts(config), "agg_mode", None)),
    _where_null("critic.enable", lambda config: getattr(estimator_facts(config), "critic", False)),
    (("critic.strategy",), _critics_engine),
    _where_null(
        f"{PROCESS}.enable", lambda config: getattr(estimator_facts(config), "process_rewards", False)
    ),
    _where_null(f"{ROLLOUT}.max_model_len", _context),
    (tuple(f"{ACTOR}.clip_ratio_{name}" for name in ("low", "high", "c")), _paper_bounds),
    *(
        (tuple(f"{block}.{name}" for name in FOLLOWED_OF_MODELS), partial(_followed_model, block))
        for block in MODELS
    ),
)
"""The keys of each step and what fills them, in this order."""
