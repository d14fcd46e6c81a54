"""Other names of keys: older names and short forms. A run prints one line for each that it meets.

    "reward_model.reward_fn.path" ──rewrite──► "reward.custom_reward_function.path"
    "algorithm.adv_estimator", "grpo_vectorized" ──rewrite_value──► "grpo"

A rewritten key may itself be an alias; `verl_keys.status` follows the chain. Sizes of Megatron-LM's layouts
mean the same in PyTorch's own engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybridflow.config.root import SFTConfig

ENGINE = "PyTorch's own engine (FSDP2, tensor parallelism, stages by 1F1B), not Megatron-LM"
ROLES = r"(actor_rollout_ref\.(?:actor|ref)|critic|reward\.reward_model)\.megatron\."
MEGATRON_BASE = "ppo_megatron_trainer"
"""verl's name for the file of all keys whose strategy is megatron."""
CHECKPOINTING = "enable_gradient_checkpointing"

MEGATRON_ALIASES: tuple[tuple[str, str], ...] = (
    (ROLES + r"tensor_model_parallel_size", r"\1.fsdp_config.tensor_parallel_size"),
    (ROLES + r"pipeline_model_parallel_size", r"\1.fsdp_config.pipeline_parallel_size"),
    (ROLES + r"virtual_pipeline_model_parallel_size", r"\1.fsdp_config.virtual_pipeline_parallel_size"),
    (ROLES + r"context_parallel_size", r"\1.ulysses_sequence_parallel_size"),
    (ROLES + r"expert_model_parallel_size", r"\1.fsdp_config.expert_parallel_size"),
    (ROLES + r"(param_offload|optimizer_offload|use_torch_compile)", r"\1.fsdp_config.\2"),
    (ROLES + r"dtype", r"\1.fsdp_config.mixed_precision.param_dtype"),
    (r"(.+\.override_config)\.model_config\.(.+)", r"\1.\2"),
)

MEGATRON_VALUES: Mapping[str, Mapping[Any, Any]] = {
    f"{block}.fsdp_config.{name}": {None: 1}
    for block in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward.reward_model")
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "virtual_pipeline_parallel_size",
        "expert_parallel_size",
    )
} | {
    f"{block}.{CHECKPOINTING}": {"full": True, None: False}
    for block in ("actor_rollout_ref.model", "critic.model")
}

MEGATRON_ALIASES_BY_VALUE: tuple[tuple[str, tuple[Any, ...], str], ...] = tuple(
    (rf"{block}\.megatron\.override_transformer_config\.recompute_granularity", ("full", None), model)
    for block, model in (
        (r"actor_rollout_ref\.actor", f"actor_rollout_ref.model.{CHECKPOINTING}"),
        ("critic", f"critic.model.{CHECKPOINTING}"),
    )
)
"""Each layer is recomputed on its own (full), or none is (null)."""


ROLLOUT = r"actor_rollout_ref\.rollout\."
LEARNERS = r"(actor_rollout_ref\.actor|critic)\."
MODELS = r"(actor_rollout_ref\.(?:actor|ref)|critic)\."

# (regular expression of the whole path, replacement); the first that matches counts.
PPO_ALIASES: tuple[tuple[str, str], ...] = (
    # short forms in which tables of documents write the keys
    (r"(actor|rollout|ref|model)\.(.+)", r"actor_rollout_ref.\1.\2"),
    (r"(actor_rollout_ref|critic|reward_model)\.model\.use_rmpad", r"\1.model.use_remove_padding"),
    # where the reward lived in older versions
    (r"reward_model\.reward_fn\.(path|name)", r"reward.custom_reward_function.\1"),
    (
        r"(?:reward_model|reward|custom_reward_function)\.overlong_buffer\.(.+)",
        r"reward.reward_kwargs.overlong_buffer_cfg.\1",
    ),
    (r"custom_reward_function\.(.+)", r"reward.custom_reward_function.\1"),
    (r"reward_model\.reward_manager", r"reward.reward_manager.name"),
    (r"reward_manager\.(.+)", r"reward.reward_manager.\1"),
    (r"reward_model\.(reward_kwargs|sandbox_fusion)\.(.+)", r"reward.\1.\2"),
    (
        r"(?:reward_model|reward\.reward_model)\."
        r"(max_concurrent|max_rpm|max_tpm|estimated_tokens_per_request|timeout|num_workers)",
        r"reward.\1",
    ),
    (r"reward_model\.reward_loop_source", r"reward.reward_manager.source"),
    (r"reward_model\.reward_loop_module_path", r"reward.reward_manager.module.path"),
    (r"reward_model\.reward_loop_class_name", r"reward.reward_manager.module.name"),
    (r"sandbox_fusion\.(.+)", r"reward.sandbox_fusion.\1"),
    (r"reward_model\.(.+)", r"reward.reward_model.\1"),
    # LoRA under the actor
    (
        r"actor_rollout_ref\.actor\.peft\.(lora_rank|lora_alpha|target_modules|peft_type)",
        r"actor_rollout_ref.model.\1",
    ),
    # routes of experts under the blocks of other engines
    (
        r"actor_rollout_ref\.actor\.(?:megatron|veomni|fsdp_config)\.router_replay\.(.+)",
        r"actor_rollout_ref.actor.router_replay.\1",
    ),
    *MEGATRON_ALIASES,
    # rollout
    (
        ROLLOUT + r"checkpoint_engine\.update_weights_bucket_megabytes",
        r"actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    ),
    (ROLLOUT + r"skip_rollout", r"actor_rollout_ref.rollout.skip.enable"),
    (ROLLOUT + r"skip_(dump_dir)", r"actor_rollout_ref.rollout.skip.\1"),
    (r"skip\.rollout\.(enable|dump_dir|action|steps|max_dump_step)", r"actor_rollout_ref.rollout.skip.\1"),
    (r"trainer\.profile_steps", r"global_profiler.steps"),
    (
        r"trainer\.((?:controller|worker)_nsight_options\..+)",
        r"global_profiler.global_tool_config.nsys.\1",
    ),
    (
        r"actor_rollout_ref\.rollout\.prometheus\.(enable|file|served_model_name)",
        r"trainer.prometheus.\1",
    ),
    (r"actor_rollout_ref\.rollout\.prometheus\.port", r"trainer.prometheus.reload_port"),
    (
        ROLLOUT + r"multi_turn\.enable_tokenization_sanity_check",
        r"actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
    ),
    (ROLLOUT + r"multi_turn\.max_turns", r"actor_rollout_ref.rollout.multi_turn.max_assistant_turns"),
    (r"data\.tool_config_path", r"actor_rollout_ref.rollout.multi_turn.tool_config_path"),
    (ROLLOUT + r"response_length", r"data.max_response_length"),
    (ROLLOUT + r"prompt_length", r"data.max_prompt_length"),
    # optimizer
    (LEARNERS + r"optim\.(?:warmup_style|lr_scheduler|lr_decay_style)", r"\1.optim.lr_scheduler_type"),
    (LEARNERS + r"optim\.lr_decay_steps", r"\1.optim.total_training_steps"),
    (LEARNERS + r"optim\.warmup_steps_proportion", r"\1.optim.lr_warmup_steps_ratio"),
    (LEARNERS + r"optim\.clip_grad", r"\1.grad_clip"),
    (LEARNERS + r"optim\.override_optimizer_config\.(betas|eps|weight_decay|momentum)", r"\1.optim.\2"),
    (LEARNERS + r"optim\.override_optimizer_config\.(ns_steps|adjust_lr)(?:_fn)?", r"\1.optim.muon_\2"),
    # where models are spread
    (MODELS + r"fsdp_config\.ulysses_sequence_parallel_size", r"\1.ulysses_sequence_parallel_size"),
    (MODELS + r"fsdp\.(.+)", r"\1.fsdp_config.\2"),
    (r"critic\.model\.fsdp_config\.(.+)", r"critic.fsdp_config.\1"),
    (MODELS + r"use_torch_compile", r"\1.fsdp_config.use_torch_compile"),
    (MODELS + r"fsdp_config\.dtype", r"\1.fsdp_config.mixed_precision.param_dtype"),
    (r"ray_init\.timeline_json_file", r"ray_kwargs.timeline_json_file"),
    (r"ray_init\.(.+)", r"ray_kwargs.ray_init.\1"),
    # sizes over all devices, deprecated; taken as the sizes per device, which they are with one
    (LEARNERS + r"ppo_micro_batch_size", r"\1.ppo_micro_batch_size_per_gpu"),
    (r"critic\.forward_micro_batch_size", r"critic.forward_micro_batch_size_per_gpu"),
    (
        r"actor_rollout_ref\.(rollout|ref)\.log_prob_micro_batch_size",
        r"actor_rollout_ref.\1.log_prob_micro_batch_size_per_gpu",
    ),
    # losses and rollout correction
    (r"actor_rollout_ref\.actor\.use_token_level_loss", r"actor_rollout_ref.actor.loss_agg_mode"),
    (r"actor_rollout_ref\.actor\.(tau_pos|tau_neg)", r"actor_rollout_ref.actor.policy_loss.\1"),
    (r"algorithm\.(rollout_[ir]s\w*)", r"algorithm.rollout_correction.\1"),
    (
        r"algorithm\.rollout_correction\.bypass_old_logprob_for_rollout",
        r"algorithm.rollout_correction.bypass_mode",
    ),
    (r"distillation\.teacher_model\.model_path", r"distillation.teacher_model.path"),
    (r"reward\.reward_model\.model_path", r"reward.reward_model.model.path"),
    (r"reward\.reward_model\.micro_batch_size", r"reward.reward_model.micro_batch_size_per_gpu"),
    (r"reward\.reward_model\.model\.fsdp_config\.(.+)", r"reward.reward_model.fsdp_config.\1"),
    # schedules
    (r"trainer\.v1\.trainer_mode", r"trainer.schedule"),
    (r"async_training\.staleness_threshold", r"trainer.async.run_ahead"),
    (r"async_training\.partial_rollout", r"trainer.async.partial_rollout"),
    (r"transfer_queue\.enable", r"trainer.row_store"),
    (r"transfer_queue\.((?:backend|metrics|controller)\..+)", r"trainer.transfer_queue.\1"),
    # checkpoints
    (LEARNERS + r"checkpoint\.contents", r"\1.checkpoint.save_contents"),
    (r"trainer\.max_(?:actor|critic)_ckpt_to_keep", r"trainer.max_ckpt_to_keep"),
    (r"trainer\.default_hdfs_dir", r"trainer.remote_checkpoint_dir"),
    (r"trainer\.val_generations_to_log_to_wandb", r"trainer.log_val_generations"),
    (r"actor_rollout_ref\.model\.external_libs", r"actor_rollout_ref.model.external_lib"),
)

# Other values of keys of the schema, by key: what now stands for them.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
VALUE_ALIASES: Mapping[str, Mapping[Any, Any]] = {
    **MEGATRON_VALUES,
    **{
        f"{block}.fsdp_config.mixed_precision.{name}": _DTYPES
        for block in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for name in ("param_dtype", "reduce_dtype")
    },
    **{f"engine.mixed_precision.{name}": _DTYPES for name in ("param_dtype", "reduce_dtype")},
    **{
        f"{block}optim.{name}": values
        for block in ("actor_rollout_ref.actor.", "critic.", "reward.process_reward_model.", "")
        for name, values in (
            ("optimizer", {"adam": "AdamW", "sgd": "SGD", "muon": "Muon"}),  # Megatron's names
            ("lr_scheduler_type", {"WSD": "wsd"}),
            ("lr_wsd_decay_steps", {None: -1}),
        )
    },
    "actor_rollout_ref.rollout.name": {"sglang_async": "sglang"},
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": {True: "strict", False: "disable"},
    # an early version of verl divided by each response's length where it did not divide by all tokens
    "actor_rollout_ref.actor.loss_agg_mode": {True: "token-mean", False: "seq-mean-token-mean"},
    "algorithm.adv_estimator": {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    "algorithm.filter_groups.metric": {None: "acc"},
    "algorithm.gdpo_reward_keys": {None: []},
    "algorithm.gdpo_reward_weights": {None: []},
    "trainer.row_store": {True: "transferqueue", False: "auto", None: "auto"},
    "trainer.schedule": {"colocate_async": "colocated_async", "separate_async": "fully_async"},
    "algorithm.rollout_correction.rollout_is": dict.fromkeys((False, "none", "null")),
    "algorithm.rollout_correction.rollout_rs": dict.fromkeys((False, "none", "null")),
}

SFT_ALIASES: tuple[tuple[str, str], ...] = (
    (r"ulysses_sequence_parallel_size", r"engine.ulysses_sequence_parallel_size"),
    (r"model\.fsdp_config\.(.+)", r"engine.\1"),
    (r"trainer\.default_hdfs_dir", r"trainer.remote_checkpoint_dir"),
    (r"engine\.cpu_offload", r"engine.offload_policy"),
    (r"engine\.offload_params", r"engine.param_offload"),
    (r"engine\.dtype", r"engine.mixed_precision.param_dtype"),
    (r"data\.balance_dp_token", r"trainer.balance_batch"),
    (r"trainer\.n_gpus", r"trainer.n_gpus_per_node"),
    (r"optim\.(?:warmup_style|lr_scheduler|lr_decay_style)", r"optim.lr_scheduler_type"),
    (r"optim\.lr_decay_steps", r"optim.total_training_steps"),
    (r"optim\.(?:warmup_steps_proportion|warmup_steps_ratio)", r"optim.lr_warmup_steps_ratio"),
    (r"optim\.clip_grad", r"trainer.grad_clip"),
    (r"optim\.override_optimizer_config\.(betas|eps|weight_decay|momentum)", r"optim.\1"),
    (r"optim\.override_optimizer_config\.(ns_steps|adjust_lr)(?:_fn)?", r"optim.muon_\1"),
    (r"model\.partial_pretrain", r"model.path"),
    (r"data\.micro_batch_size", r"data.micro_batch_size_per_gpu"),
    (r"data\.multiturn\.(messages_key|tools_key|enable_thinking_key)", r"data.\1"),
    (r"checkpoint\.contents", r"checkpoint.save_contents"),
    (r"trainer\.checkpoint\.(save_contents|load_contents)", r"checkpoint.\1"),
)

# (regular expression of the whole path, the values with which it is another key, that key).
ALIASES_BY_VALUE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (r"(?:reward\.reward_manager\.name|reward_model\.reward_manager)", ("batch",), r"reward.manager"),
    (
        r"actor_rollout_ref\.actor\.use_rollout_log_probs",
        (True,),
        r"algorithm.rollout_correction.bypass_mode",
    ),
    *MEGATRON_ALIASES_BY_VALUE,
    (ROLLOUT + r"dtype", ("fp8",), r"actor_rollout_ref.rollout.quantization"),
    (
        r"((?:actor_rollout_ref\.(?:actor|ref)|critic)\.fsdp_config|engine)\.model_dtype",
        ("bf16", "bfloat16"),
        r"\1.mixed_precision.param_dtype",
    ),
)


def _aliases(root: type[Any]) -> tuple[tuple[str, str], ...]:
    if issubclass(root, SFTConfig):
        return SFT_ALIASES
    return PPO_ALIASES


def rewrite(root: type[Any], path: str, value: Any) -> str | None:
    """Return the key that now stands for `path` with this value, or None where `path` is no alias."""
    for text, values, new in ALIASES_BY_VALUE:
        match = re.fullmatch(text, path)
        if match and value in values:
            return match.expand(new)
    for pattern, new in _aliases(root):
        match = re.fullmatch(pattern, path)
        if match:
            return match.expand(new)
    return None


def rewrite_value(path: str, value: Any) -> Any:
    """Return the value that now stands for `value` at a key of the schema; itself if it is no alias."""
    if not isinstance(value, (str, bool, type(None))):
        return value
    return VALUE_ALIASES.get(path, {}).get(value, value)
