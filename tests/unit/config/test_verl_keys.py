"""Every key of verl's documents is native, an alias, without effect, or refused with a reason; none is
unknown, none is lost silently.

The documents themselves are not part of the project: the commands, YAML blocks and tables of keys in them are
repeated here as data.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.aliases import PPO_ALIASES, SFT_ALIASES, VALUE_ALIASES
from hybridflow.config.checks.notes import ppo_notes
from hybridflow.config.load import load_config
from hybridflow.config.trainer import PrometheusConfig
from hybridflow.config.tree import flatten, get_value, is_native, keys_of
from hybridflow.config.verl_keys import _ruled, status
from hybridflow.config.verl_rule import Rule
from hybridflow.config.verl_rules import PPO_RULES, REFUSED_VALUES
from hybridflow.config.verl_rules_sft import SFT_RULES
from hybridflow.errors import ConfigError

BOTH = {**keys_of(PPOConfig), **keys_of(SFTConfig)}
COMMANDS = r"""
trainer.n_gpus_per_node=8 trainer.nnodes=2
data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
  data.train_batch_size=256
data.max_prompt_length=512 data.max_response_length=512
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 critic.optim.lr=1e-5
  critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console
  trainer.val_before_train=False
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15
actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.actor.strategy=megatron
  actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.model.path=Qwen/Qwen2.5-7B
reward_model.reward_fn.path=verl/utils/reward_score/my_reward.py \
reward_model.reward_fn.name=compute_reward
reward_model.enable=True \
reward_model.model.path=my-org/reward-model-7b \
reward_model.micro_batch_size_per_gpu=4
trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.n_gpus_per_node=4 trainer.nnodes=2
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
algorithm.adv_estimator=grpo algorithm.adv_estimator=rloo algorithm.adv_estimator=reinforce_plus_plus
algorithm.use_kl_in_reward=True algorithm.norm_adv_by_std_in_grpo=True algorithm.gamma=1.0 algorithm.lam=1.0
data.prompt_key=prompt actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.clip_ratio=0.2
  actor_rollout_ref.actor.ppo_epochs=1
actor_rollout_ref.actor.entropy_coeff=0.0 actor_rollout_ref.actor.use_kl_loss=False
  actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.use_torch_compile=True rollout.name=vllm rollout.name=hf rollout.temperature=1.0
  rollout.top_p=1.0 rollout.n=1
rollout.tensor_model_parallel_size=1 rollout.gpu_memory_utilization=0.5 rollout.enforce_eager=True
  trainer.project_name=verl
trainer.experiment_name=default trainer.total_epochs=1 trainer.save_freq=-1 trainer.test_freq=-1
actor.ppo_mini_batch_size=256 actor.checkpoint.async_save=False data.return_raw_input_ids=False
  data.return_raw_chat=False
data.return_full_prompt=False data.seed=42 data.filter_overlong_prompts_workers=1 data.truncation=error
"""

PPO_YAML = (
    """
    data: {tokenizer: null, train_files: a, val_files: b, train_max_samples: -1, val_max_samples: -1,
    prompt_key: prompt,
      max_prompt_length: 512, max_response_length: 512, train_batch_size: 1024, return_raw_input_ids:
      False, return_raw_chat: False,
      return_full_prompt: False, shuffle: True, seed: 42, filter_overlong_prompts: False,
      filter_overlong_prompts_workers: 1,
      truncation: error, image_key: images, trust_remote_code: True, custom_cls: {path: null, name: null}}
    """,
    """
    data: {train_files: a, val_files: b, train_batch_size: 256, max_prompt_length: 512,
    max_response_length: 512}
    actor_rollout_ref:
      model: {path: Qwen/Qwen2.5-7B-Instruct}
      actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: 64, ppo_micro_batch_size_per_gpu: 4, ppo_epochs: 1,
      clip_ratio: 0.2, grad_clip: 1.0,
        entropy_coeff: 0.0, use_torch_compile: true}
      rollout: {name: vllm, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.4, temperature: 1.0,
      top_p: 1.0, n: 1}
      ref: {log_prob_micro_batch_size_per_gpu: 4}
    critic: {model: {path: Qwen/Qwen2.5-7B-Instruct}, optim: {lr: 1e-5}, ppo_micro_batch_size_per_gpu: 4}
    algorithm: {adv_estimator: gae, kl_ctrl: {kl_coef: 0.001}}
    trainer: {n_gpus_per_node: 4, nnodes: 1, total_epochs: 15, save_freq: 10, logger: [console, wandb],
    project_name: ppo-gsm8k}
    """,
    """
    data: {train_files: a, val_files: b, train_batch_size: 128, max_prompt_length: 512,
    max_response_length: 1024}
    actor_rollout_ref:
      model: {path: Qwen/Qwen2.5-7B-Instruct}
      actor: {optim: {lr: 1e-6}, use_kl_loss: true, kl_loss_coef: 0.001, ppo_mini_batch_size: 64,
      ppo_micro_batch_size_per_gpu: 2}
      rollout: {name: vllm, n: 8, temperature: 1.0, tensor_model_parallel_size: 2, gpu_memory_utilization:
      0.5}
    algorithm: {adv_estimator: grpo}
    trainer: {n_gpus_per_node: 4, total_epochs: 20}
    """,
    "actor_rollout_ref: {actor: {clip_ratio_low: 0.2, clip_ratio_high: 0.28}}",
    """actor_rollout_ref: {actor: {peft: {peft_type: lora, lora_rank: 16, lora_alpha: 32, target_modules:
    [q_proj, v_proj]}}}""",
    """rollout: {multi_turn: {enable: true, max_turns: 5, tool_server: "http://tool-server:8080"}}""",
    "rollout: {dtype: fp8}",
    "trainer: {prometheus: {enable: true, port: 9090}}",
    "resource_pool: {actor_rollout_ref: {devices: [0, 1]}, critic: {devices: [4]}, reward_model: {devices: "
    "[6]}}",
)

SFT_YAML = """
    data: {train_files: a, val_files: b, prompt_key: prompt, response_key: response,
    micro_batch_size_per_gpu: 4}
    model: {path: Qwen/Qwen2.5-7B-Instruct}
    trainer: {n_gpus_per_node: 4, nnodes: 1, total_epochs: 3, save_freq: 500, project_name: my-sft,
    logger: [console, wandb]}
    optim: {lr: 2e-5, weight_decay: 0.01, warmup_steps_proportion: 0.1, lr_scheduler: cosine}
"""

# The keys of verl's own default files (configuration reference of 2025 and 2026), with values that leave
# every feature as it is.
PPO_REFERENCE = """
actor_rollout_ref:
  hybrid_engine: true
  nccl_timeout: 600
  model: {path: m, custom_chat_template: null, use_shm: false, external_lib: null, override_config: {},
  enable_gradient_checkpointing: true,
    enable_activation_offload: false, use_remove_padding: false, lora_rank: 0, lora_alpha: 16,
    target_modules: all-linear,
    exclude_modules: null, lora_adapter_path: null, use_liger: false, use_fused_kernels: false,
    fused_kernel_options: {impl_backend: torch},
    trust_remote_code: false, tiled_mlp: {enabled: false}, freeze_vision_tower: false, lora: {rank: 0,
    merge: false, dropout: 0}}
  actor: &actor
    strategy: fsdp
    ppo_mini_batch_size: 256
    ppo_micro_batch_size: null
    ppo_micro_batch_size_per_gpu: null
    use_dynamic_bsz: false
    ppo_max_token_len_per_gpu: 16384
    clip_ratio: 0.2
    clip_ratio_low: 0.2
    clip_ratio_high: 0.2
    tau_pos: 1.0
    tau_neg: 1.05
    policy_loss: {_target_: verl.X, loss_mode: vanilla, clip_cov_ratio: 0.0002, clip_cov_lb: 1.0,
    clip_cov_ub: 5.0, kl_cov_ratio: 0.0002,
      ppo_kl_coef: 0.1}
    clip_ratio_c: 3.0
    loss_agg_mode: token-mean
    loss_scale_factor: null
    entropy_coeff: 0
    calculate_entropy: false
    calculate_sum_pi_squared: false
    use_kl_loss: false
    use_prefix_grouper: false
    use_torch_compile: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    ppo_epochs: 1
    shuffle: false
    data_loader_seed: 42
    checkpoint: {_target_: verl.X, save_contents: [model, optimizer, extra], load_contents: [model],
    async_save: false}
    optim: {lr: 1e-06, lr_warmup_steps_ratio: 0.0, total_training_steps: -1, weight_decay: 0.01,
    lr_warmup_steps: -1, _target_: verl.X,
      min_lr_ratio: 0.0, num_cycles: 0.5, warmup_style: constant, lr_scheduler_type: constant, betas:
      [0.9, 0.999], clip_grad: 1.0,
      optimizer: AdamW, optimizer_impl: torch.optim, override_optimizer_config: null}
    use_fused_kernels: false
    profiler: {_target_: verl.X, tool: null, enable: false, all_ranks: false, ranks: [], save_path: p,
    tool_config: {nsys: {discrete: false}}}
    grad_clip: 1.0
    ulysses_sequence_parallel_size: 1
    entropy_from_logits_with_chunking: false
    entropy_checkpointing: false
    fsdp_config: {_target_: verl.X, wrap_policy: {min_num_params: 0}, param_offload: false,
    optimizer_offload: false, offload_policy: false,
      reshard_after_forward: true, fsdp_size: -1, forward_prefetch: false, model_dtype: fp32, dtype:
      bfloat16, use_orig_params: false,
      seed: 42, full_determinism: false, use_torch_compile: true, ulysses_sequence_parallel_size: 1}
    use_remove_padding: false
    router_replay: {mode: disabled}
  ref: {strategy: fsdp, use_torch_compile: true, log_prob_micro_batch_size: null,
  log_prob_micro_batch_size_per_gpu: null,
    log_prob_use_dynamic_bsz: false, log_prob_max_token_len_per_gpu: 16384, profiler: {enable: false},
    model: null,
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: true}, ulysses_sequence_parallel_size: 1,
    entropy_from_logits_with_chunking: false, entropy_checkpointing: false}
  rollout: {_target_: verl.X, name: native, mode: async, temperature: 1.0, top_k: -1, top_p: 1,
  prompt_length: 512, response_length: 512,
    dtype: bfloat16, gpu_memory_utilization: 0.5, ignore_eos: false, enforce_eager: false,
    cudagraph_capture_sizes: null,
    free_cache_engine: true, tensor_model_parallel_size: 1, data_parallel_size: 1, expert_parallel_size: 1,
    pipeline_model_parallel_size: 1, max_num_batched_tokens: 8192, max_model_len: null, max_num_seqs: 1024,
    log_prob_micro_batch_size: null, log_prob_micro_batch_size_per_gpu: null, log_prob_use_dynamic_bsz: false,
    log_prob_max_token_len_per_gpu: 16384, disable_log_stats: true, do_sample: true, n: 1,
    over_sample_rate: 0,
    multi_stage_wake_up: false, engine_kwargs: {vllm: {swap_space: null}, sglang: {attention_backend: null}},
    val_kwargs: {_target_: verl.X, top_k: -1, top_p: 1.0, temperature: 0, n: 1, do_sample: false},
    multi_turn: {_target_: verl.X, enable: false, max_assistant_turns: null, tool_config_path: null,
    max_user_turns: null,
      max_parallel_calls: 1, max_tool_response_length: 256, tool_response_truncate_side: middle,
      interaction_config_path: null,
      use_inference_chat_template: false, tokenization_sanity_check_mode: strict, format: hermes},
    calculate_log_probs: false, agent: {_target_: verl.X, num_workers: 8, default_agent_loop:
    single_turn_agent, agent_loop_config_path: null,
      custom_async_server: {path: null, name: null}}, update_weights_bucket_megabytes: 512, trace:
      {backend: null, token2text: false},
    skip_rollout: false, skip_dump_dir: d, enable_chunked_prefill: true, enable_prefix_caching: true,
    load_format: dummy_dtensor,
    layered_summon: false, quantization: null, logprobs_mode: processed_logprobs, seed: 42,
    prometheus: {enable: false, port: 9090, file: f, served_model_name: m}}
data: {tokenizer: null, use_shm: false, train_files: a, val_files: b, prompt_key: prompt, reward_fn_key:
  data_source,
  max_prompt_length: 512, max_response_length: 512, train_batch_size: 1024, val_batch_size: null,
  gen_batch_size: null,
  return_raw_input_ids: false, return_raw_chat: true, return_full_prompt: false, shuffle: true,
  dataloader_num_workers: 8,
  validation_shuffle: false, filter_overlong_prompts: false, filter_overlong_prompts_workers: 1,
  truncation: error, image_key: images,
  video_key: videos, trust_remote_code: false, custom_cls: {path: null, name: null},
  return_multi_modal_inputs: true,
  sampler: {class_path: null, class_name: null}, datagen: {path: null, name: null},
  apply_chat_template_kwargs: {}, audio_key: audios,
  tool_config_path: null, mm_processor_kwargs: {}}
critic: {_target_: verl.X, rollout_n: 1, strategy: fsdp, enable: null,
  optim: {lr: 1e-05, lr_warmup_steps_ratio: 0.0, total_training_steps: -1, weight_decay: 0.01,
  lr_warmup_steps: -1, min_lr_ratio: 0.0,
    warmup_style: constant}, model: {path: m, tokenizer_path: t, override_config: {}, external_lib: null,
    trust_remote_code: false,
    use_shm: false, enable_gradient_checkpointing: true, enable_activation_offload: false,
    use_remove_padding: false,
    fsdp_config: {param_offload: false, fsdp_size: -1}, lora_rank: 0, lora_alpha: 16, target_modules:
    all-linear},
  ppo_mini_batch_size: 256, ppo_micro_batch_size: null, ppo_micro_batch_size_per_gpu: null,
  use_dynamic_bsz: false,
  ppo_max_token_len_per_gpu: 32768, forward_max_token_len_per_gpu: 32768, ppo_epochs: 1, shuffle: false,
  data_loader_seed: null,
  cliprange_value: 0.5, loss_agg_mode: token-mean, checkpoint: {save_contents: [model], load_contents:
  [model], async_save: false},
  profiler: {enable: false, ranks: []}, forward_micro_batch_size: null, forward_micro_batch_size_per_gpu:
  null,
  ulysses_sequence_parallel_size: 1, grad_clip: 1.0}
reward_model: {enable: false, strategy: fsdp, model: {input_tokenizer: t, path: m, external_lib: null,
  trust_remote_code: false,
    use_remove_padding: false, fsdp_config: {param_offload: false}}, micro_batch_size: null,
    micro_batch_size_per_gpu: null,
  max_length: null, use_dynamic_bsz: false, forward_max_token_len_per_gpu: 32768, reward_manager: naive,
  launch_reward_fn_async: false,
  sandbox_fusion: {url: null, max_concurrent: 64, memory_limit_mb: 1024}, profiler: {enable: false},
  ulysses_sequence_parallel_size: 1,
  reward_kwargs: {overlong_buffer_cfg: {enable: false, len: 4096, penalty_factor: 1.0, log: false},
  max_resp_len: 1024}}
reward: {num_workers: 8, custom_reward_function: {path: null, name: compute_score}, sandbox_fusion: {url:
  null, max_concurrent: 64},
  reward_manager: {source: register, name: naive, module: {path: null, name: null}},
  reward_model: {enable: false, enable_resource_pool: false, n_gpus_per_node: 0, nnodes: 0, model_path:
  null, rollout: {name: vllm}}}
custom_reward_function: {path: null, name: compute_score}
algorithm: {_target_: verl.X, gamma: 1.0, lam: 1.0, adv_estimator: gae, norm_adv_by_std_in_grpo: true,
  use_kl_in_reward: false, kl_penalty: kl,
  kl_ctrl: {_target_: verl.X, type: fixed, kl_coef: 0.001, horizon: 10000, target_kl: 0.1}, use_pf_ppo: false,
  pf_ppo: {reweight_method: pow, weight_pow: 2.0}, gdpo_reward_keys: null, gdpo_reward_weights: null,
  filter_groups: {enable: false, metric: null, max_num_gen_batches: 0},
  rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null,
  rollout_rs_threshold: null, bypass_mode: false,
    loss_type: ppo_clip, rollout_is_batch_normalize: false}}
trainer: {balance_batch: true, total_epochs: 30, total_training_steps: null, project_name: p,
  experiment_name: e, logger: [console, wandb],
  log_val_generations: 0, rollout_data_dir: null, validation_data_dir: null, nnodes: 1, n_gpus_per_node:
  1, save_freq: -1,
  esi_redundant_time: 0, resume_mode: auto, resume_from_path: null, val_before_train: true, val_only:
  false, test_freq: -1,
  critic_warmup: 0, default_hdfs_dir: null, del_local_ckpt_after_load: false, default_local_dir: d,
  max_actor_ckpt_to_keep: null,
  max_critic_ckpt_to_keep: null, ray_wait_register_center_timeout: 300, device: cuda,
  use_legacy_worker_impl: auto, use_v1: true,
  v1: {trainer_mode: sync, colocate_async: {num_warmup_batches: 1}, separate_async: {num_warmup_batches: 1,
  parameter_sync_step: 4, hybrid_rollout: {enable_switch: false, switch_threshold_ratio: 0.4}},
  sampler: {max_off_policy_threshold: 8, max_off_policy_strategy: drop, sync_refill_failed_groups: False,
  custom_sampler: {path: null, name: null}, sampler_kwargs: {}}}, profile_steps: null}
global_profiler: {_target_: verl.X, tool: null, steps: null, profile_continuous_steps: false, save_path: p,
  global_tool_config: {nsys: {discrete: false}, torch_memory: {stack_depth: 32, kw_args: {}}}}
skip: {rollout: {enable: false, dump_dir: d, steps: [], action: cache}}
transfer_queue: {enable: false, backend: {storage_backend: SimpleStorage}}
distillation: {enabled: false, teacher_model: {model_path: null}}
ray_kwargs: {ray_init: {num_cpus: null}, timeline_json_file: null}
"""

SFT_REFERENCE = """
data: {train_batch_size: 256, micro_batch_size_per_gpu: 4, micro_batch_size: 4, max_token_len_per_gpu:
  8192, use_dynamic_bsz: True,
  train_files: a, val_files: b, train_max_samples: -1, val_max_samples: -1, messages_key: messages,
  tools_key: tools,
  enable_thinking_key: enable_thinking, pad_mode: no_padding, max_length: 1024, truncation: error,
  balance_dp_token: False,
  custom_cls: {path: null, name: null}, use_shm: False, apply_chat_template_kwargs: {},
  ignore_input_ids_mismatch: False,
  multiturn: {enable: false, messages_key: messages}}
model: {path: m, lora_rank: 0, lora_alpha: 16, target_modules: all-linear, use_liger: false,
  trust_remote_code: false,
  enable_gradient_checkpointing: true, fsdp_config: {cpu_offload: false}, partial_pretrain: m,
  external_lib: null, use_remove_padding: true}
engine: {strategy: fsdp2, param_offload: false, ulysses_sequence_parallel_size: 1, model_dtype: fp32}
optim: {lr: 1e-5, betas: [0.9, 0.95], weight_decay: 0.01, warmup_steps_ratio: 0.1, clip_grad: 1.0,
  lr_scheduler: cosine, optimizer: AdamW,
  min_lr_ratio: 0.0, lr_warmup_steps_ratio: 0.0, num_cycles: 0.5, lr_warmup_steps: -1}
ulysses_sequence_parallel_size: 1
use_remove_padding: false
checkpoint: {_target_: verl.X, save_contents: [model], load_contents: [model], mbridge_config:
  {memory_efficient: true}}
trainer: {default_local_dir: d, default_hdfs_dir: null, project_name: p, experiment_name: e, total_epochs:
  4, total_training_steps: null,
  logger: [console], seed: 1, save_freq: -1, test_freq: -1, max_ckpt_to_keep: null, resume_mode: auto,
  resume_from_path: null,
  device: cuda, nnodes: 1, n_gpus_per_node: 1}
"""

# Of the blocks of verl's Megatron optimizer, with its defaults.
MEGATRON_OPTIMIZER = """
actor_rollout_ref: {actor: {tis_imp_ratio_cap: -1, optim: &optim {lr: 1e-06, lr_decay_style: constant,
  lr_decay_steps: null, lr_warmup_init: 0.0, min_lr: 0.0, weight_decay_incr_style: constant,
  lr_wsd_decay_style: exponential, lr_wsd_decay_steps: null, use_checkpoint_opt_param_scheduler: false}}}
critic: {optim: *optim}
"""


def settings(text: str) -> list[tuple[str, Any]]:
    """Overrides found in a command line, and their values as YAML reads them."""
    found = re.findall(r"(?:^|\s)\+?([a-z_][\w]*(?:\.\w+)+)=(\S*)", text)
    assert found
    return [(path, yaml.safe_load(value)) for path, value in found]


def blocks(text: str) -> list[tuple[str, Any]]:
    return flatten(yaml.safe_load(text))


def assert_known(root: type, found: list[tuple[str, Any]]) -> None:
    for path, value in found:
        result = status(root, path, value)
        assert result.kind != "unknown", f"{path}={value}"
        assert result.kind == "native" or result.reason, f"{path}={value} has no reason"
        if result.kind in ("native", "alias"):
            assert is_native(root, result.path), path


def test_every_override_of_the_documents_is_known() -> None:
    found = settings(COMMANDS)
    assert len(found) > 60
    assert_known(PPOConfig, found)


@pytest.mark.parametrize("text", [*PPO_YAML, MEGATRON_OPTIMIZER])
def test_every_yaml_block_of_the_documents_is_known(text: str) -> None:
    assert_known(PPOConfig, blocks(text))


def test_every_sft_key_of_the_documents_is_known() -> None:
    assert_known(SFTConfig, blocks(SFT_YAML))


@pytest.mark.parametrize(
    ("root", "text"),
    [(PPOConfig, PPO_REFERENCE), (PPOConfig, MEGATRON_OPTIMIZER), (SFTConfig, SFT_REFERENCE)],
)
def test_verls_own_defaults_are_accepted(root: type, text: str) -> None:
    found = blocks(text)
    assert_known(root, found)
    refused = {
        path: status(root, path, value).reason
        for path, value in found
        if status(root, path, value).kind == "refused"
    }
    assert not refused


def test_verls_defaults_of_the_algorithms_load_to_ours(tmp_path: Path) -> None:
    block = yaml.safe_load(PPO_REFERENCE)["algorithm"]
    (tmp_path / "verl.yaml").write_text(
        yaml.safe_dump({"algorithm": block, "distillation": {"enabled": False}})
    )
    loaded = load_config(PPOConfig, recipe=tmp_path / "verl.yaml")
    ours = PPOConfig().algorithm
    assert replace(loaded.config.algorithm, filter_groups=ours.filter_groups) == ours
    assert loaded.config.algorithm.filter_groups == replace(ours.filter_groups, max_num_gen_batches=0)
    assert "algorithm.filter_groups.metric=null is now acc" in loaded.notes


def test_values_of_verl_that_have_another_name_here() -> None:
    loaded = load_config(
        PPOConfig, ["algorithm.adv_estimator=rloo_vectorized", "algorithm.rollout_correction.rollout_is=none"]
    )
    assert loaded.config == load_config(PPOConfig, ["algorithm.adv_estimator=rloo"]).config
    assert "algorithm.adv_estimator=rloo_vectorized is now rloo" in loaded.notes and len(loaded.notes) == 2
    old = load_config(PPOConfig, ["actor_rollout_ref.rollout.name=sglang_async"])
    assert old.config.actor_rollout_ref.rollout.name == "sglang" and len(old.notes) == 1
    assert status(PPOConfig, "algorithm.adv_estimator", "grpo_vectorized").value == "grpo"


def test_a_null_in_place_of_a_block_leaves_it_as_it_is() -> None:
    loaded = load_config(PPOConfig, ["algorithm.rollout_correction=null", "algorithm.filter_groups=null"])
    assert loaded.config == load_config(PPOConfig).config
    assert all(
        note.startswith("algorithm.{rollout_correction=null, filter_groups=null} have no effect: ")
        for note in loaded.notes
    )
    assert len(loaded.notes) == 1  # a reason that keys of a block share is said once
    assert (
        load_config(PPOConfig, ["algorithm.pf_ppo.weight_pow=3", "~algorithm.pf_ppo"]).config
        == load_config(PPOConfig).config
    )


@pytest.mark.parametrize("name", ["dapo", "gdpo", "prime", "naive"])
def test_one_reward_manager_does_the_work_of_verls(name: str) -> None:
    loaded = load_config(
        PPOConfig,
        [f"reward_model.reward_manager={name}", "reward_model.reward_kwargs.overlong_buffer_cfg.log=True"],
    )
    assert loaded.config == load_config(PPOConfig).config and "overlong_buffer_cfg" in loaded.notes[0]


def test_a_wrong_key_of_reward_kwargs_is_not_lost() -> None:
    with pytest.raises(
        ConfigError, match=r"did you mean reward\.reward_kwargs\.overlong_buffer_cfg\.penalty_factor"
    ):
        load_config(PPOConfig, ["reward_model.reward_kwargs.overlong_buffer_cfg.penalty_facto=1"])


@pytest.mark.parametrize("rules", [PPO_RULES, SFT_RULES])
def test_true_never_passes_as_the_accepted_one_nor_false_as_zero(rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        for value, number in ((True, 1), (False, 0)):
            given = rule.accepted or ()
            if any(each is value for each in given):
                continue
            # only the number may be accepted, never the truth value by way of it
            assert _ruled(rule, "a", value).kind == ("no effect" if rule.accepted is None else "refused")
            assert number in given or rule.accepted is None or _ruled(rule, "a", number).kind == "refused"


HONOURED = [
    (SFTConfig, "model.fsdp_config.cpu_offload=True", "engine.offload_policy", True),
    (SFTConfig, "model.fsdp_config.offload_params=True", "engine.param_offload", True),
    (SFTConfig, "engine.model_dtype=bf16", "engine.mixed_precision.param_dtype", "bfloat16"),
    (SFTConfig, "engine.dtype=fp32", "engine.mixed_precision.param_dtype", "float32"),
    (SFTConfig, "data.balance_dp_token=False", "trainer.balance_batch", False),
    (
        PPOConfig,
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
        "float32",
    ),
    (PPOConfig, "trainer.v1.trainer_mode=separate_async", "trainer.schedule", "fully_async"),
    (PPOConfig, "trainer.v1.trainer_mode=colocate_async", "trainer.schedule", "colocated_async"),
    (PPOConfig, "transfer_queue.enable=True", "trainer.row_store", "transferqueue"),
    (PPOConfig, "transfer_queue.enable=False", "trainer.row_store", "auto"),
    (PPOConfig, "async_training.staleness_threshold=0.5", "trainer.async.run_ahead", 0.5),
    (PPOConfig, "async_training.partial_rollout=False", "trainer.async.partial_rollout", False),
    (
        PPOConfig,
        "actor_rollout_ref.actor.use_rollout_log_probs=True",
        "algorithm.rollout_correction.bypass_mode",
        True,
    ),
    (
        PPOConfig,
        "critic.fsdp.model_dtype=bf16",
        "critic.fsdp_config.mixed_precision.param_dtype",
        "bfloat16",
    ),
    (
        PPOConfig,
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        64,
    ),
    (
        PPOConfig,
        "actor_rollout_ref.actor.use_token_level_loss=True",
        "actor_rollout_ref.actor.loss_agg_mode",
        "token-mean",
    ),
    (
        PPOConfig,
        "actor_rollout_ref.actor.use_token_level_loss=False",
        "actor_rollout_ref.actor.loss_agg_mode",
        "seq-mean-token-mean",
    ),
    (
        PPOConfig,
        "custom_reward_function.overlong_buffer.len=64",
        "reward.reward_kwargs.overlong_buffer_cfg.len",
        64,
    ),
    (PPOConfig, "reward_model.num_workers=3", "reward.num_workers", 3),
    (PPOConfig, "trainer.val_generations_to_log_to_wandb=3", "trainer.log_val_generations", 3),
    (
        PPOConfig,
        "ray_init.timeline_json_file=timeline.json",
        "ray_kwargs.timeline_json_file",
        "timeline.json",
    ),
    (
        PPOConfig,
        "actor_rollout_ref.rollout.multi_turn.enable_tokenization_sanity_check=False",
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
        "disable",
    ),
]


@pytest.mark.parametrize(("root", "override", "path", "value"), HONOURED)
def test_what_a_user_of_verl_asks_for_is_done(root: type, override: str, path: str, value: Any) -> None:
    loaded = load_config(root, [override])
    assert get_value(loaded.config, path) == value and path in loaded.given
    name, _, given = override.partition("=")
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    now = path
    if shown != given.lower():
        now += f"={shown}"
    assert loaded.notes == [f"{name} is now {now}"]


HARMLESS = """
actor_rollout_ref.actor.fsdp_config.grad_offload=True critic.model.fsdp_config.grad_offload=False
actor_rollout_ref.model.use_rmpad=True critic.model.use_rmpad=True reward_model.model.use_rmpad=True
actor_rollout_ref.actor.megatron.use_remove_padding=False
actor_rollout_ref.rollout.micro_batch_size=128 actor_rollout_ref.rollout.chat_scheduler=null
actor_rollout_ref.rollout.use_fire_sampling=False actor_rollout_ref.actor.load_weight=True
actor_rollout_ref.actor.rollout_n=5 critic.rollout_n=5 data.need_tools_kwargs=True
actor_rollout_ref.model.fused_kernel_options.impl_backend=triton
reward_model.use_reward_loop=True reward_model.reward_loop_source=register
reward_model.reward_loop_module_path=null trainer.controller_nsight_options.trace=cuda
trainer.worker_nsight_options.kill=none
actor_rollout_ref.model.override_config.attention_dropout=0.
actor_rollout_ref.model.override_config.embd_pdrop=0. actor_rollout_ref.model.override_config.resid_pdrop=0
actor_rollout_ref.model.override_config.model_config={}
actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=False
"""
"""Keys of scripts of older versions of verl, which say nothing that a run here does not do anyway."""


def test_keys_of_older_scripts_that_change_nothing_stay() -> None:
    words = HARMLESS.split()
    loaded = load_config(PPOConfig, words)
    assert loaded.config == load_config(PPOConfig).config and not loaded.given
    said = " ".join(loaded.notes)
    assert all(word.partition("=")[0].rpartition(".")[2] in said for word in words)


def test_settings_of_the_queue_keep_their_names() -> None:
    loaded = load_config(PPOConfig, ["transfer_queue.backend.storage_backend=MooncakeStore"])
    assert loaded.config.trainer.transfer_queue == {"backend": {"storage_backend": "MooncakeStore"}}
    assert "trainer.transfer_queue.* is not read" in " ".join(ppo_notes(loaded.config, loaded.given))


def test_no_effect_prints_one_line_and_changes_nothing() -> None:
    loaded = load_config(
        PPOConfig, ["actor_rollout_ref.model.use_remove_padding=True", "trainer.use_legacy_worker_impl=auto"]
    )
    assert loaded.config == load_config(PPOConfig).config and not loaded.given
    assert loaded.notes[0].startswith(
        "actor_rollout_ref.model.use_remove_padding=true has no effect: sequences are always packed"
    )
    assert len(loaded.notes) == 2


def test_status_depends_on_the_value() -> None:
    path = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert [status(PPOConfig, path, value).kind for value in (False, None, "a.B")] == [
        "no effect",
        "no effect",
        "refused",
    ]
    assert status(PPOConfig, "no.such.key", 1).kind == "unknown"


def test_verls_prometheus_is_the_runs() -> None:
    verls = "actor_rollout_ref.rollout.prometheus"
    loaded = load_config(PPOConfig, [f"{verls}.enable=true", f"{verls}.port=9090", f"{verls}.file=p.yml"])
    assert loaded.config.trainer.prometheus == PrometheusConfig(enable=True, file="p.yml", reload_port=9090)


@pytest.mark.parametrize(("root", "aliases"), [(PPOConfig, PPO_ALIASES), (SFTConfig, SFT_ALIASES)])
def test_no_alias_hides_a_key_of_the_schema(root: type, aliases: tuple[tuple[str, str], ...]) -> None:
    for pattern, _ in aliases:
        hidden = [path for path in keys_of(root) if re.fullmatch(pattern, path)]
        assert not hidden, pattern


@pytest.mark.parametrize("rules", [PPO_RULES, SFT_RULES])
def test_every_rule_says_why_and_the_way_out(rules: tuple[Any, ...]) -> None:
    for rule in rules:
        assert rule.why or rule.accepted == (), rule.pattern
        assert (rule.accepted is None) != bool(rule.refusal), rule.pattern
    assert all(path in BOTH for path in REFUSED_VALUES)


def test_other_values_stand_for_keys_of_the_schema() -> None:
    for path, values in VALUE_ALIASES.items():
        root = PPOConfig if path in keys_of(PPOConfig) else SFTConfig
        assert path in BOTH and all(status(root, path, value).kind == "alias" for value in values), path


def test_attention_of_the_model_is_ours() -> None:
    notes = load_config(
        PPOConfig, ["+actor_rollout_ref.model.override_config.attn_implementation=eager"]
    ).notes
    assert len(notes) == 1 and "one attention" in notes[0]
    rope = load_config(PPOConfig, ["+actor_rollout_ref.model.override_config.rope_scaling.factor=2"]).config
    assert rope.actor_rollout_ref.model.override_config == {"rope_scaling": {"factor": 2}}


def test_the_learning_rate_of_a_megatron_script_is_that_of_ours() -> None:
    wanted = ["lr_decay_style=cosine", "lr_decay_steps=40"]
    for block in ("actor_rollout_ref.actor.optim", "critic.optim"):
        config = load_config(PPOConfig, [f"{block}.{word}" for word in wanted]).config
        optim = get_value(config, block)
        assert (optim.lr_scheduler_type, optim.total_training_steps) == ("cosine", 40)
    optim = load_config(SFTConfig, [f"optim.{word}" for word in wanted]).config.optim
    assert (optim.lr_scheduler_type, optim.total_training_steps) == ("cosine", 40)


def test_a_reason_that_many_keys_share_is_said_once() -> None:
    keys = [f"{role}.megatron.{name}=true" for role in ("actor", "ref", "critic") for name in ("a", "b", "c")]
    with pytest.raises(ConfigError) as error:
        load_config(PPOConfig, keys)
    assert str(error.value).count("this setting of Megatron-LM has no counterpart here") == 1
    assert all(each in str(error.value) for each in keys)


def test_keys_of_other_optimizers() -> None:
    block = "actor_rollout_ref.actor.optim"
    given = {
        "optimizer": "muon",
        "override_optimizer_config.ns_steps": 7,
        "override_optimizer_config.adjust_lr_fn": "original",
        "override_optimizer_config.momentum": 0.9,
        "lr_decay_style": "WSD",
        "lr_wsd_decay_steps": 3,
        "lr_wsd_decay_style": "minus_sqrt",
        "optimizer_impl": "torchao.optim",
    }
    loaded = load_config(PPOConfig, [f"+{block}.{name}={value}" for name, value in given.items()])
    optim = loaded.config.actor_rollout_ref.actor.optim
    assert (optim.optimizer, optim.muon_ns_steps, optim.muon_adjust_lr) == ("Muon", 7, "original")
    assert (optim.momentum, optim.lr_scheduler_type, optim.lr_wsd_decay_steps) == (0.9, "wsd", 3)
