"""The keys that verl documents and the schema does not have, as data: which values are accepted and why, and
why not the others.

Read by `verl_keys.status`. Patterns are regular expressions of whole dotted paths; the first rule that
matches counts, so the key that switches a feature on stands before the other keys of the feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Keys outside the schema: `accepted` values (None: all) have no effect because `why`; the others are
    refused because `refusal`.
    """

    pattern: str
    accepted: tuple[Any, ...] | None
    why: str
    refusal: str = ""


ROLLOUT, ACTOR = r"actor_rollout_ref\.rollout\.", r"actor_rollout_ref\.actor\."
OFF: tuple[Any, ...] = (None, False, 0, "null", "none", "None", "", [], {})
OFF_OR_ONE: tuple[Any, ...] = (*OFF, 1, -1)
SERVER_ENGINES = "not in this version: use actor_rollout_ref.rollout.name=native, which generates with the module that trains"
CORRECTION = r"algorithm\.rollout_correction\."
DISTILLATION = "set algorithm.adv_estimator=on_policy_distillation and distillation.teacher_model.path"
RESULTS_SAME = "it changes memory or speed in verl, not results"


def ignored(pattern: str, why: str) -> Rule:
    """Keys that have no effect, whatever their value."""
    return Rule(pattern, None, why)


def off(pattern: str, refusal: str) -> Rule:
    """Keys of a feature that this version does not have: only values that leave it off are accepted."""
    return Rule(pattern, OFF, "it is off", refusal)


FUSED_ALWAYS = "always on: head and log-probs are one function, a chunk of tokens at a time, and whole logits never exist"
FUSED_BACKEND = Rule(
    r".+\.fused_kernel_options\.impl_backend",
    (None, "torch"),
    FUSED_ALWAYS,
    "set torch, which is always on and never holds whole logits: Liger's fused cross-entropy in Triton gives no entropy of the tokens",
)
NO_ENGINE = "not in this version: use actor_rollout_ref.actor.strategy=fsdp2"

# Values of native keys that verl knows and this version does not.
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "actor_rollout_ref.rollout.name": {
        **dict.fromkeys(("trtllm", "tgi", "naive"), SERVER_ENGINES),
        "openai": "an endpoint's weights cannot be trained: use actor_rollout_ref.rollout.name=native; for evaluation and judges there is "
        "hybridflow.rollout.openai.engine.OpenAIEngine (docs/rollout/engines.md)",
    },
    "actor_rollout_ref.actor.strategy": dict.fromkeys(
        ("megatron", "veomni", "torchtitan", "automodel", "mindspeed"), NO_ENGINE
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        "bypass_mode": "a mode, not a loss: set algorithm.rollout_correction.bypass_mode=true, with loss_type=ppo_clip or reinforce"
    },
    "algorithm.rollout_correction.rollout_rs": {
        "token": "older name: the option is token_k1",
        "sequence": "older name: the option is seq_sum_k1",
        "geometric": "older name: the option is seq_mean_k1",
    },
    "trainer.device": {
        "npu": "not in this version: use auto, cuda or cpu",
        "mps": "not in this version: use cpu",
    },
}

# fmt: off
PPO_RULES: tuple[Rule, ...] = (
    ignored(r"hydra\..+|(.+\.)?_target_", "the run folder is trainer.default_local_dir, and blocks have one type"),
    # model
    ignored(r"(actor_rollout_ref|critic|reward)\.(\w+\.)?use_remove_padding", "sequences are always packed: no padding is ever computed"),
    Rule(r"(.+\.)?lora\.rank", OFF, "LoRA of Megatron models is off", "set actor_rollout_ref.model.lora_rank"),
    Rule(r".+\.peft_type", (*OFF, "lora", "LORA"), "adapters are LoRA", "adapters are LoRA: leave it out"),
    off(r".+\.target_parameters", "adapters go to linear layers: set target_modules"),
    ignored(r".+\.lora\..+", "read only with Megatron"),
    FUSED_BACKEND,
    ignored(r".+\.(use_fused_kernels|fused_kernel_options\..+)", FUSED_ALWAYS),
    ignored(r".+\.(use_shm|tiled_mlp\..+)", RESULTS_SAME),
    off(r".+\.custom_chat_template", "set the chat template in the tokenizer's own folder (data.tokenizer)"),
    off(r".+\.(hf_config_path|generation_config_path)", "put the config file into the model's folder"),
    Rule(r".+\.freeze_vision_tower", OFF, "text models only", "vision models come in a later version"),
    Rule(r".+\.(mtp\..+|router_replay\..+)", (*OFF, "disabled"), "off", "not in this version: leave it out"),
    Rule(r"actor_rollout_ref\.ref\.model(\..+)?", OFF, "the reference is the actor's first weights",
         "a reference of its own comes later: leave it out"),
    # training engine
    ignored(r".+\.(use_dynamic_bsz|log_prob_use_dynamic_bsz)", "micro-batches are always packed up to the token limit and the row limit"),
    ignored(r".+\.(entropy_from_logits_with_chunking|entropy_checkpointing|calculate_entropy)", "entropy is always computed in chunks"),
    ignored(r".+\.calculate_sum_pi_squared", "Σπ² is computed when the advantage estimator needs it"),
    Rule(
        r".+\.(fsdp_config|fsdp)\.(model_dtype|dtype)",
        (*OFF, "fp32", "float32", "bfloat16", "bf16", "auto"),
        "the `dtype` key of the model decides",
        "set the `dtype` key of the model (actor_rollout_ref.model.dtype, critic.model.dtype)",
    ),
    ignored(r".+\.(fsdp_config|fsdp)\.seed", "trainer.seed keys every draw"),
    ignored(r".+\.(fsdp_config|fsdp)\.wrap_policy(\..+)?", "each transformer block is a unit"),
    ignored(r".+\.(fsdp_config|fsdp)\.(mixed_precision\.buffer_dtype|use_orig_params|full_determinism|strategy)", RESULTS_SAME),
    Rule(r"(distillation|reward)\..+\.(fsdp_config|fsdp)\..+", None, "these models are spread as the actor is"),
    Rule(r".+\.megatron\..+", OFF_OR_ONE, "the training engine is FSDP2", "Megatron comes in a later version: leave it out"),
    Rule(r"(critic|actor_rollout_ref\.ref|reward\.reward_model)\.strategy", ("fsdp", "fsdp2"), "the engine is FSDP2", "set fsdp2"),
    Rule(r".+\.data_loader_seed", (*OFF, 42, 1), "trainer.seed keys every draw", "set trainer.seed"),
    ignored(r"critic\.rollout_n", "actor_rollout_ref.rollout.n decides"),
    Rule(r".+\.optim\.(optimizer|optimizer_impl)", ("AdamW", "adamw", "adam", "torch.optim"), "AdamW is the optimizer", "use AdamW"),
    off(r".+\.optim\.override_optimizer_config(\..+)?", "set betas, eps and weight_decay of the optim block"),
    Rule(r".+\.optim\.(zero_indexed_step|init_lr_ratio)", (*OFF, True), "off", "not in this version: leave it out"),
    ignored(r".+\.checkpoint\.mbridge_config\..+", "the training engine is FSDP2"),
    Rule(r"actor_rollout_ref\.hybrid_engine", (True,), "always on",
         "the native engine always shares the trainer's weights: leave it out"),
    ignored(r".+\.nccl_timeout", "trainer.worker_timeout bounds every call"),
    # rollout
    Rule(ROLLOUT + r"mode", ("async", "sync"), "the native engine runs in the trainer's process", "leave it out"),
    Rule(
        ROLLOUT + r"(data|expert|pipeline_model|decode_context|prefill_context)_parallel_size",
        OFF_OR_ONE,
        "every process of the rollout's pools generates",
        "not in this version: set it to 1; every process of the rollout's pools generates, tensor_model_parallel_size of them together",
    ),
    off(ROLLOUT + r"quantization_config_file", "set actor_rollout_ref.rollout.engine_kwargs.vllm, with rollout.name=vllm"),
    Rule(
        ROLLOUT + r"(layered_summon|multi_stage_wake_up|disable_log_stats|swap_space"
        r"|checkpoint_engine\..+|engine_kwargs\..+)",
        None,
        "a setting of a separate inference server; the native engine needs none",
    ),
    ignored(ROLLOUT + r"calculate_log_probs", "the engine always returns log-probs"),
    Rule(ROLLOUT + r"logprobs_mode", (None, "processed_logprobs"), "log-probs are of the distribution at `temperature`",
         "log-probs are always those of the distribution at `temperature`: leave it out"),
    Rule(ROLLOUT + r"seed", (*OFF, 42), "trainer.seed keys every draw", "set trainer.seed"),
    Rule(ROLLOUT + r"(over_sample_rate|limit_images)", (*OFF, 1.0), "off", "not in this version"),
    off(ROLLOUT + r"multi_turn\.enable", "tools and several turns come in a later version"),
    ignored(ROLLOUT + r"multi_turn\..+", "read only with multi_turn.enable, which is off in this version"),
    ignored(ROLLOUT + r"agent\.num_workers", "the native engine runs in the trainer's process"),
    Rule(ROLLOUT + r"agent\..+", (*OFF, "single_turn_agent"), "off", "agent loops come in a later version"),
    off(ROLLOUT + r"trace\.backend", "traces come in a later version; trainer.rollout_data_dir writes samples"),
    ignored(ROLLOUT + r"trace\..+", "read only with trace.backend"),
    off(ROLLOUT + r"(skip_rollout|skip\.enable)", "replaying stored rollouts comes in a later version"),
    ignored(ROLLOUT + r"(skip_dump_dir|skip\..+)", "read only with skip_rollout"),
    off(ROLLOUT + r"prometheus\.enable", "comes in a later version; trainer.logger=[console,tensorboard] shows metrics"),
    ignored(ROLLOUT + r"prometheus\..+", "read only with prometheus.enable"),
    # data
    ignored(r"data\.(return_raw_input_ids|return_raw_chat|return_full_prompt|return_multi_modal_inputs)",
         "rows keep their messages and their ids"),
    ignored(r"data\.(filter_overlong_prompts_workers|use_shm)", RESULTS_SAME),
    ignored(r"data\.(image_key|video_key|audio_key|image_patch_size|mm_processor_kwargs(\..+)?)", "text models only in this version"),
    off(r"data\.datagen\.(path|name)", "data made during the run comes later; data.custom_cls and data.sampler take your own classes"),
    off(r"data\.(tool_config_path|chat_template)", "not in this version"),
    # reward
    ignored(r"reward\.(reward_model\.)?num_examine", "trainer.log_val_generations shows samples"),
    off(r"reward\.reward_model\.enable", "learned reward models come later: use reward.custom_reward_function"),
    off(r"reward\.reward_model\.enable_resource_pool", "learned reward models come later; trainer.placement gives a role its pool"),
    ignored(r"reward\.reward_model\.launch_reward_fn_async", "rewards are scored by workers of their own"),
    ignored(r"reward\.reward_model\..+", "read only with a learned reward model, which comes in a later version"),
    Rule(r"reward\.reward_manager\.name", (*OFF, "naive", "dapo", "gdpo", "prime"),
         "one manager scores all rewards; reward.function, reward.terms or reward.custom_reward_function decide, with "
         "reward.reward_kwargs.overlong_buffer_cfg for dapo, algorithm.gdpo_reward_keys for gdpo, reward.num_workers for prime",
         "use reward.function, reward.terms or reward.custom_reward_function"),
    Rule(r"reward\.reward_manager\..+", (*OFF, "register"), "off", "use reward.custom_reward_function"),
    ignored(r"reward\.reward_kwargs\.overlong_buffer_cfg\.log", "reward metrics are always logged"),
    off(r"reward\.sandbox_fusion\.url", "running code for rewards comes in a later version"),
    ignored(r"reward\.sandbox_fusion\..+", "read only with sandbox_fusion.url"),
    # algorithm
    ignored(r"algorithm\.filter_groups\.max_inflight_gen_batches", "one generation batch runs at a time"),
    Rule(CORRECTION + r"rollout_is_mode", (*OFF, "truncate"), "a number as rollout_is_threshold truncates",
         "set algorithm.rollout_correction.rollout_is_threshold to two numbers as lo_hi, which sets weights outside to 0"),
    off(CORRECTION + r"rollout_is_level", "set algorithm.rollout_correction.rollout_is=token or sequence"),
    off(CORRECTION + r"rollout_[ir]s_threshold_(lower|upper)", "write both bounds into the threshold as lo_hi, for example 0.5_2.0"),
    off(CORRECTION + r"rollout_(is|rs|token)_veto_threshold",
        "use algorithm.rollout_correction.rollout_rs=seq_max_k2 or seq_max_k3 with a threshold"),
    off(CORRECTION + r"(use_pure_rollout_correction|use_policy_gradient)",
        "set algorithm.rollout_correction.bypass_mode=true and loss_type=reinforce"),
    # trainer and the rest
    ignored(r"trainer\.ray_wait_register_center_timeout", "trainer.startup_timeout bounds the start of workers"),
    ignored(r"trainer\.use_legacy_worker_impl", "there is one implementation"),
    ignored(r"trainer\.(use_v1|v1\..+)", "there is one trainer, which is synchronous"),
    off(r"trainer\.default_hdfs_dir", "checkpoints go to trainer.default_local_dir: leave it out"),
    off(r"trainer\.(del_local_ckpt_after_load|remove_previous_ckpt_in_save)", "use trainer.max_ckpt_to_keep"),
    off(r"trainer\.esi_redundant_time", "comes in a later version: use trainer.save_freq"),
    off(r"trainer\.(profile_steps|npu_profile\..+)", "profilers come in a later version"),
    off(r"global_profiler\.(tool|steps)", "profilers come in a later version"),
    ignored(r"global_profiler\..+", "read only with global_profiler.tool"),
    off(r".+\.profiler\.(enable|tool)", "profilers come in a later version"),
    ignored(r".+\.profiler\..+", "read only with profiler.enable"),
    Rule(r"ray_kwargs\.ray_init\..+", (), "", "give it to `ray start`, and join that cluster by ray_kwargs.ray_init.address"),
    off(r"(transfer_queue|skip)(\.\w+)?\.(enable|enabled)", "comes in a later version"),
    ignored(r"(transfer_queue|skip)\..+", "read only when it is enabled"),
    off(r"distillation\.(enable|enabled)", DISTILLATION),
    off(r"distillation\.teacher_models(\.\w+)?(\.model_path)?", DISTILLATION),
    ignored(r"distillation\.(teacher_models|teacher_model\.inference|distillation_loss)\..+", f"there is one teacher: {DISTILLATION}"),
    ignored(r"distillation\.(teacher_key|enable_resource_pool|n_gpus_per_node|nnodes|num_workers)",
         "trainer.placement gives a role its pool"),
    Rule(r"async_training(\..+)?", (), "", "the trainer is synchronous in this version: leave it out"),
    Rule(r"resource_pool(\..+)?", (), "", "set trainer.resource_pools={name: [devices of each node]} and trainer.placement={role: name}"),
)

SFT_RULES: tuple[Rule, ...] = (
    ignored(r"hydra\..+|(.+\.)?_target_", "the run folder is trainer.default_local_dir, and blocks have one type"),
    ignored(r"(data\.|model\.)?(use_dynamic_bsz|use_remove_padding|balance_dp_token)",
         "sequences are always packed up to the token limit"),
    Rule(r"data\.pad_mode", (None, "no_padding"), "sequences are always packed", "sequences are always packed: leave it out"),
    ignored(r"data\.(tools_key|enable_thinking_key|use_shm|ignore_input_ids_mismatch|multiturn\..+)",
         "columns of tools are not read in this version"),
    off(r"data\.(custom_cls\.(path|name)|chat_template)", "not for SFT in this version"),
    Rule(r"engine\.(strategy)", ("fsdp", "fsdp2"), "the engine is FSDP2", "set fsdp2"),
    Rule(r"engine\.(model_dtype|dtype)", (*OFF, "fp32", "float32", "bfloat16", "bf16", "auto"), "model.dtype decides", "set model.dtype"),
    ignored(r"engine\.(wrap_policy(\..+)?|mixed_precision\.buffer_dtype|use_orig_params|full_determinism)", RESULTS_SAME),
    Rule(r"engine\..+", OFF_OR_ONE, "off", "not in this version: leave it out"),
    FUSED_BACKEND,
    ignored(r"model\.(use_fused_kernels|fused_kernel_options\..+)", FUSED_ALWAYS),
    ignored(r"model\.(use_shm|strategy)", RESULTS_SAME),
    Rule(r"optim\.(optimizer|optimizer_impl)", ("AdamW", "adamw", "adam", "torch.optim"), "AdamW is the optimizer", "use AdamW"),
    off(r"optim\.override_optimizer_config(\..+)?", "set betas, eps and weight_decay of the optim block"),
    ignored(r"checkpoint\.mbridge_config\..+", "the training engine is FSDP2"),
    off(r"trainer\.default_hdfs_dir", "checkpoints go to trainer.default_local_dir: leave it out"),
    off(r"(.+\.)?profiler\.(enable|tool)", "profilers come in a later version"),
    ignored(r"(.+\.)?profiler\..+", "read only with profiler.enable"),
)
# fmt: on
