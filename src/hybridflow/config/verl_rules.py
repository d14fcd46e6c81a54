"""Keys of verl's reinforcement learning outside the schema, as data: values accepted, and others refused.

`verl_keys.status` reads the tables. A pattern is a regular expression of a whole dotted path. The first rule
that matches counts, so the key that switches a feature on stands before the other keys of that feature.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.verl_megatron import MEGATRON_RULES
from hybridflow.config.verl_rule import (
    FSDP,
    FSDP2,
    FUSED_ALWAYS,
    FUSED_BACKEND,
    HYDRA,
    LATER,
    OFF,
    OFF_OR_ONE,
    OPTIMIZER,
    PROFILERS,
    RESULTS_SAME,
    Rule,
    ignored,
    off,
    only,
    seed,
    sharding,
)
from hybridflow.config.verl_rules_schedules import OWN_DEVICES, SCHEDULES

ROLLOUT = r"actor_rollout_ref\.rollout\."
ACTOR = r"actor_rollout_ref\.actor\."
CORRECTION = r"algorithm\.rollout_correction\."
SERVER_ENGINES = (
    "this version does not have this engine: use actor_rollout_ref.rollout.name=native, which generates "
    "with the module that trains, or vllm or sglang"
)
DISTILLATION = "set algorithm.adv_estimator=on_policy_distillation and distillation.teacher_model.path"
DISTILLATION_LOSS = (
    "distillation here is an advantage estimator, the reverse KL of each sampled token (k1 as a policy "
    f"gradient), and has no other loss: {DISTILLATION}, and leave distillation.distillation_loss out"
)
ONE_MODEL_LAYOUT = (
    "this model is sharded as the actor is: set the key in actor_rollout_ref.actor.fsdp_config, or leave it "
    "out"
)


NO_ENGINE = "this version does not have this engine: use actor_rollout_ref.actor.strategy=fsdp2"

# Values of native keys that verl knows and this version does not.
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "actor_rollout_ref.rollout.name": {
        **dict.fromkeys(("trtllm", "tgi", "naive"), SERVER_ENGINES),
        "openai": (
            "the weights of an endpoint cannot be trained: use actor_rollout_ref.rollout.name=native; for "
            "evaluation and judges there is hybridflow.rollout.openai.engine.OpenAIEngine "
            "(docs/rollout/engines.md)"
        ),
    },
    "actor_rollout_ref.actor.strategy": dict.fromkeys(
        ("veomni", "torchtitan", "automodel", "mindspeed"), NO_ENGINE
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        "bypass_mode": "this is a mode and no loss: set algorithm.rollout_correction.bypass_mode=true, with "
        "loss_type=ppo_clip or reinforce"
    },
    **{
        f"{block}optim.optimizer": {"Adam": "weight decay here is decoupled: set AdamW"}
        for block in ("actor_rollout_ref.actor.", "critic.", "")
    },
    **{
        f"{block}.mixed_precision.param_dtype": dict.fromkeys(
            ("float16", "fp16", "half"), "this version computes in bfloat16 or float32: set one of them"
        )
        for block in (
            "actor_rollout_ref.actor.fsdp_config",
            "actor_rollout_ref.ref.fsdp_config",
            "critic.fsdp_config",
            "engine",
        )
    },
    "algorithm.rollout_correction.rollout_rs": {
        "token": "this is an older name: the option is token_k1",
        "sequence": "this is an older name: the option is seq_sum_k1",
        "geometric": "this is an older name: the option is seq_mean_k1",
    },
    "trainer.device": {
        "mps": "this version does not run on it: use cpu",
    },
}

MODEL: tuple[Rule, ...] = (
    ignored(
        r"(actor_rollout_ref|critic|reward)\.(\w+\.){0,2}use_remove_padding",
        "sequences are always packed, so no padding is ever computed",
    ),
    Rule(
        r"(.+\.)?lora\.rank", OFF, "LoRA of Megatron models is off", "set actor_rollout_ref.model.lora_rank"
    ),
    off(r"(.+\.)?lora\.adapter_path", "set actor_rollout_ref.model.lora_adapter_path"),
    ignored(r".+\.lora\..+", "it is read only with Megatron's lora.rank, which is off"),
    only(r".+\.peft_type", (*OFF, "lora"), "adapters are LoRA"),
    off(r".+\.target_parameters", "adapters go to linear layers: set target_modules"),
    FUSED_BACKEND,
    ignored(r".+\.(use_fused_kernels|fused_kernel_options\..+)", FUSED_ALWAYS),
    ignored(r".+\.use_shm", RESULTS_SAME),
    off(
        r".+\.tiled_mlp\.(enable|enabled)",
        "this version does not cut the MLP into tiles: to save memory set "
        "enable_gradient_checkpointing=true or enable_activation_offload=true in the model's block",
    ),
    ignored(r".+\.tiled_mlp\..+", "it is read only with tiled_mlp.enabled, which is off"),
    off(r".+\.custom_chat_template", "put the chat template into the tokenizer's folder (data.tokenizer)"),
    off(r".+\.(hf_config_path|generation_config_path)", "put the file into the model's folder"),
    off(r".+\.mtp\.(enable|enable_train|enable_rollout)", LATER),
    ignored(r".+\.mtp\..+", "it is read only with mtp.enable, which is off"),
    off(
        r".+\.router_replay\.(record_file|replay_file)",
        "routes travel with the rows and are never in a file of their own: leave it out",
    ),
    Rule(
        r".+\.router_replay\..+",
        (*OFF, "disabled"),
        "the feature is off",
        "set actor_rollout_ref.actor.router_replay.mode",
    ),
)

ENGINE: tuple[Rule, ...] = (
    ignored(
        r".+\.(use_dynamic_bsz|log_prob_use_dynamic_bsz)",
        "micro-batches are always packed up to the token limit and the row limit",
    ),
    ignored(
        r".+\.(entropy_from_logits_with_chunking|entropy_checkpointing|calculate_entropy)",
        "the entropy is always computed, a chunk of tokens at a time",
    ),
    ignored(r".+\.calculate_sum_pi_squared", "Σπ² is computed when the advantage estimator needs it"),
    off(rf"(distillation|reward)\..+\.{FSDP}\.(param|optimizer|grad)_offload", ONE_MODEL_LAYOUT),
    Rule(
        rf"(distillation|reward)\..+\.{FSDP}\..+",
        OFF_OR_ONE,
        "this model is sharded as the actor is",
        ONE_MODEL_LAYOUT,
    ),
    *sharding(rf".+\.{FSDP}"),
    off(
        rf".+\.{FSDP}\.full_determinism",
        "every draw is keyed by trainer.seed, and on a CPU a run repeats to the bit with num_threads fixed; "
        "deterministic CUDA kernels are not in this version: leave it out",
    ),
    seed(r".+\.data_loader_seed"),
    ignored(r"(critic|actor_rollout_ref\.actor)\.rollout_n", "actor_rollout_ref.rollout.n decides"),
    only(
        r"(critic|actor_rollout_ref\.(actor|ref)|reward\.reward_model)\.load_weight",
        (None, True),
        "a model's weights are always loaded",
    ),
    ignored(r".+\.checkpoint\.mbridge_config\..+", "it is read only with Megatron, and the engine is FSDP2"),
    Rule(
        r"actor_rollout_ref\.hybrid_engine",
        (None, True),
        "it is always on",
        f"generation shares the processes of training unless it has a pool of its own: {OWN_DEVICES}",
    ),
    ignored(r".+\.nccl_timeout", "trainer.worker_timeout bounds every call"),
)

ROLLOUTS: tuple[Rule, ...] = (
    only(
        ROLLOUT + r"mode",
        (None, "async", "sync"),
        "each step waits for all of its responses, however the engine serves them",
    ),
    Rule(
        ROLLOUT + r"(data|expert|pipeline_model|decode_context|prefill_context)_parallel_size",
        OFF_OR_ONE,
        "every process of the rollout's pools generates",
        "this version does not have it: set it to 1; every process of the rollout's pools generates, and "
        "tensor_model_parallel_size of them generate together",
    ),
    off(
        ROLLOUT + r"quantization_config_file",
        "set actor_rollout_ref.rollout.engine_kwargs.vllm, with rollout.name=vllm",
    ),
    ignored(ROLLOUT + r"(layered_summon|multi_stage_wake_up|disable_log_stats)", RESULTS_SAME),
    off(
        ROLLOUT + r"swap_space",
        "the native engine has no swap space: leave it out; with rollout.name=vllm, set "
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
    ),
    ignored(
        ROLLOUT + r"checkpoint_engine\..+",
        "actor_rollout_ref.rollout.server.transport decides how weights travel",
    ),
    ignored(
        ROLLOUT + r"engine_kwargs\..+", "it is read only by that engine, which this version does not have"
    ),
    ignored(ROLLOUT + r"calculate_log_probs", "the engine always returns log-probs"),
    only(
        ROLLOUT + r"logprobs_mode",
        (None, "processed_logprobs"),
        "log-probs are always those of the distribution at `temperature`",
    ),
    seed(ROLLOUT + r"seed"),
    off(
        ROLLOUT + r"over_sample_rate",
        "no response is started to be dropped: leave it out; trainer.schedule=fully_async trains on the "
        "groups that are done while slow ones go on",
    ),
    off(
        ROLLOUT + r"(chat_scheduler|multi_turn\.completion_callback)",
        "what it did, an agent loop does: set actor_rollout_ref.rollout.agent.agent_loop_config_path "
        "(docs/agents/agent_loops.md)",
    ),
    off(ROLLOUT + r"use_fire_sampling", LATER),
    ignored(ROLLOUT + r"micro_batch_size", RESULTS_SAME),
    off(ROLLOUT + r"limit_images", "a row has as many pictures as its data gives it: leave it out"),
    only(
        ROLLOUT + r"multi_turn\.use_inference_chat_template",
        OFF,
        "a conversation is rendered once, and later turns by the template's own text between them",
    ),
    off(
        ROLLOUT + r"multi_turn\.tool_server",
        "name the tool's class and its address in a file (multi_turn.tool_config_path), such as "
        "hybridflow.tools.search_tool.SearchTool with retrieval_service_url",
    ),
    off(ROLLOUT + r"agent\.custom_async_server(\..+)?", "set rollout.name, or rollout.server.address"),
    off(ROLLOUT + r"agent\.agent_loop_manager_class", "set agent.default_agent_loop=path/to/file.py:NAME"),
    ignored(
        ROLLOUT + r"trace\.(project_name|experiment_name)", "trainer.project_name and experiment_name name it"
    ),
    only(ROLLOUT + r"skip\.steps", (None, []), "every step is dumped and read back"),
    ignored(ROLLOUT + r"skip\.max_dump_step", "every step is dumped; repeat takes those that are there"),
)


DATA: tuple[Rule, ...] = (
    ignored(
        r"data\.(return_raw_input_ids|return_raw_chat|return_full_prompt|return_multi_modal_inputs)",
        "rows always keep their messages and their token ids",
    ),
    ignored(r"data\.(filter_overlong_prompts_workers|use_shm)", RESULTS_SAME),
    ignored(r"data\.need_tools_kwargs", "it changes no row: a row without tools_kwargs has none"),
    only(r"data\.audio_key", (*OFF, "audios"), "no model that is supported hears, and no sound is read"),
    ignored(r"data\.image_patch_size", "the size of patches is in the processor's file of the model"),
    off(
        r"data\.mm_processor_kwargs(\..+)?",
        "set it in preprocessor_config.json of the model's folder, which every engine reads",
    ),
    off(
        r"data\.datagen\.(path|name)",
        "data that is made during the run comes in a later version; data.custom_cls and data.sampler take "
        "your own classes",
    ),
    off(r"data\.chat_template", "put the chat template into the tokenizer's folder (data.tokenizer)"),
)

REWARD: tuple[Rule, ...] = (
    ignored(r"reward\.(reward_model\.)?num_examine", "trainer.log_val_generations shows samples"),
    off(
        r"reward\.reward_model\.(enable_resource_pool|n_gpus_per_node|nnodes)",
        "name a pool in trainer.resource_pools and set trainer.placement.reward_model to it",
    ),
    ignored(
        r"reward\.reward_model\.(launch_reward_fn_async|use_reward_loop)",
        "processes of their own (reward.num_workers) score",
    ),
    ignored(
        r"reward\.reward_model\.model\.input_tokenizer",
        "conversations are told in messages to the model's own template and tokenizer",
    ),
    ignored(
        r"reward\.reward_model\.(rollout|profiler|router)\..+",
        "the reward model is computed as the reference is, without a server of its own",
    ),
    Rule(
        r"reward\.reward_manager\.name",
        (*OFF, "naive", "dapo", "gdpo", "prime", "remote", "limited", "rate_limited"),
        "one manager scores all rewards: reward.function, reward.terms or reward.custom_reward_function "
        "decide, with reward.reward_kwargs.overlong_buffer_cfg for dapo, algorithm.gdpo_reward_keys for "
        "gdpo, reward.num_workers for prime and remote, and reward.max_rpm, max_tpm, max_concurrent and "
        "max_retries for limited",
        "a manager of your own is reward.manager=path/to/file.py:name",
    ),
    Rule(
        r"reward\.reward_manager\..+",
        (*OFF, "register"),
        "one manager scores all rewards",
        "a manager of your own is reward.manager=path/to/file.py:name",
    ),
    ignored(
        r"reward\.reward_kwargs\.overlong_buffer_cfg\.log", "the metrics of the reward are always logged"
    ),
)

ALGORITHM: tuple[Rule, ...] = (
    Rule(
        r"actor_rollout_ref\.actor\.tis_imp_ratio_cap",
        (*OFF, -1),
        "the correction is off",
        "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold to this number",
    ),
    ignored(r"algorithm\.filter_groups\.max_inflight_gen_batches", "one generation batch runs at a time"),
    Rule(
        CORRECTION + r"rollout_is_mode",
        (*OFF, "truncate"),
        "one number as rollout_is_threshold truncates",
        "set algorithm.rollout_correction.rollout_is_threshold to two numbers as lo_hi, which sets weights "
        "outside to 0",
    ),
    off(CORRECTION + r"rollout_is_level", "set algorithm.rollout_correction.rollout_is=token or sequence"),
    off(
        CORRECTION + r"rollout_[ir]s_threshold_(lower|upper)",
        "write both bounds into the threshold as lo_hi, for example 0.5_2.0",
    ),
    off(
        CORRECTION + r"rollout_(is|rs|token)_veto_threshold",
        "use algorithm.rollout_correction.rollout_rs=seq_max_k2 or seq_max_k3 with a threshold",
    ),
    off(
        CORRECTION + r"(use_pure_rollout_correction|use_policy_gradient)",
        "set algorithm.rollout_correction.bypass_mode=true and loss_type=reinforce",
    ),
)

TRAINER: tuple[Rule, ...] = (
    ignored(
        r"trainer\.ray_wait_register_center_timeout", "trainer.startup_timeout bounds the start of workers"
    ),
    ignored(r"trainer\.use_legacy_worker_impl", "there is one implementation of the workers"),
    ignored(r"trainer\.use_v1", "there is one trainer, and trainer.schedule says when it generates"),
    off(r"trainer\.(del_local_ckpt_after_load|remove_previous_ckpt_in_save)", "use trainer.max_ckpt_to_keep"),
    off(r"trainer\.npu_profile\..+", "set global_profiler.tool=torch, whose profiler knows the device"),
    ignored(r"global_profiler\.profile_continuous_steps", "each step has a trace of its own"),
    ignored(
        r"global_profiler\.(relocate_results|finish_hook.*)", "traces are written to save_path and left there"
    ),
    ignored(
        r"global_profiler\.global_tool_config\..+",
        "the tools have one setting each, which records whole steps",
    ),
)

REST: tuple[Rule, ...] = (
    Rule(
        r"ray_kwargs\.ray_init\..+",
        (),
        "",
        "give it to `ray start`, and join that cluster by ray_kwargs.ray_init.address",
    ),
    off(r"skip(\.\w+)?\.(enable|enabled)", "it comes in a later version: leave it out"),
    ignored(r"skip\..+", "it is read only when the feature is enabled, and it is off"),
    off(r"distillation\.(enable|enabled)", DISTILLATION),
    off(r"distillation\.teacher_models(\.\w+)?(\.model_path)?", DISTILLATION),
    Rule(
        r"distillation\.distillation_loss\.loss_mode",
        (None, "k1"),
        "it is what this version has",
        DISTILLATION_LOSS,
    ),
    Rule(
        r"distillation\.distillation_loss\.use_policy_gradient",
        (None, True),
        "it is what this version has",
        DISTILLATION_LOSS,
    ),
    off(r"distillation\.distillation_loss\..+", DISTILLATION_LOSS),
    ignored(
        r"distillation\.(teacher_models|teacher_model\.inference)\..+",
        "the one teacher is computed as the reference is, without a server of its own",
    ),
    off(r"distillation\.enable_resource_pool", "trainer.placement gives a role its pool"),
    ignored(
        r"distillation\.(teacher_key|n_gpus_per_node|nnodes|num_workers)",
        "there is one teacher, and trainer.placement says where it computes",
    ),
    Rule(
        r"resource_pool(\..+)?",
        (),
        "",
        "set trainer.resource_pools={name: [devices of each node]} and trainer.placement={role: name}",
    ),
)

PPO_RULES: tuple[Rule, ...] = (
    *HYDRA,
    *MODEL,
    *MEGATRON_RULES,
    *ENGINE,
    *OPTIMIZER,
    *ROLLOUTS,
    *DATA,
    *REWARD,
    *ALGORITHM,
    *SCHEDULES,
    *TRAINER,
    *PROFILERS,
    *REST,
)


SFT_RULES: tuple[Rule, ...] = (
    *HYDRA,
    ignored(
        r"(data\.|model\.)?(use_dynamic_bsz|use_remove_padding)",
        "sequences are always packed up to the token limit",
    ),
    only(r"data\.pad_mode", (None, "no_padding"), "sequences are always packed"),
    ignored(
        r"data\.multiturn\..+",
        "rows with a column of messages (data.messages_key) are always conversations of several turns",
    ),
    ignored(r"data\.use_shm", RESULTS_SAME),
    ignored(
        r"data\.ignore_input_ids_mismatch",
        "a conversation is encoded as a whole, so there are no turns whose tokens could differ",
    ),
    off(
        r"data\.custom_cls\.(path|name)",
        "supervised runs read files with messages, or with a prompt and a response: leave it out",
    ),
    off(r"data\.chat_template", "put the chat template into the tokenizer's folder (data.tokenizer)"),
    *sharding("engine"),
    Rule(r"engine\..+", OFF_OR_ONE, "the feature is off", LATER),
    FUSED_BACKEND,
    ignored(r"model\.(use_fused_kernels|fused_kernel_options\..+)", FUSED_ALWAYS),
    ignored(r"model\.use_shm", RESULTS_SAME),
    Rule(r"model\.strategy", FSDP2, "the engine is FSDP2", "set fsdp2"),
    *OPTIMIZER,
    ignored(r"checkpoint\.mbridge_config\..+", "it is read only with Megatron, and the engine is FSDP2"),
    *PROFILERS,
)
