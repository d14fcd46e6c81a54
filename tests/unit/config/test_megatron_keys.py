"""verl's documented commands for Megatron, but for sizes and models, and what they mean here."""

from __future__ import annotations

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.checks.cluster import ppo_cluster_problems
from hybridflow.config.load import load_config
from hybridflow.config.resolve import resolve

FLAGS = ["--config-path=./config", "--config-name=ppo_megatron_trainer.yaml"]
DENSE_PPO = """
algorithm.adv_estimator=gae data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.gpu_memory_utilization=0.5 critic.optim.lr=1e-5
critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size_per_gpu=4
critic.megatron.pipeline_model_parallel_size=2 critic.megatron.virtual_pipeline_model_parallel_size=2
critic.megatron.tensor_model_parallel_size=4 algorithm.use_kl_in_reward=False trainer.critic_warmup=0
trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15
"""
MOE_GRPO = """
algorithm.adv_estimator=grpo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
actor_rollout_ref.actor.megatron.use_dist_checkpointing=True actor_rollout_ref.actor.megatron.use_mbridge=True
actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.optimizer_offload=True
actor_rollout_ref.actor.megatron.grad_offload=True actor_rollout_ref.ref.megatron.param_offload=True
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
+actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=1
+actor_rollout_ref.actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split=False
actor_rollout_ref.actor.megatron.sequence_parallel=True
actor_rollout_ref.actor.megatron.use_distributed_optimizer=True actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.n=5
actor_rollout_ref.actor.use_dynamic_bsz=True trainer.n_gpus_per_node=4 trainer.nnodes=1
"""
CONTEXT = """
actor_rollout_ref.actor.strategy=megatron critic.strategy=megatron actor_rollout_ref.ref.strategy=megatron
actor_rollout_ref.actor.megatron.context_parallel_size=2
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1 trainer.n_gpus_per_node=4
"""


def sizes(block: object) -> tuple[int, int, int]:
    fsdp = block.fsdp_config  # type: ignore[attr-defined]
    return fsdp.tensor_parallel_size, fsdp.pipeline_parallel_size, fsdp.virtual_pipeline_parallel_size


def loaded(words: str, *more: str) -> tuple[PPOConfig, list[str]]:
    read = load_config(PPOConfig, [*more, *words.split()])
    config, notes = resolve(read.config, read.given)
    return config, [*read.notes, *notes]


def test_the_dense_command() -> None:
    config, notes = loaded(DENSE_PPO, *FLAGS)
    roles = config.actor_rollout_ref
    assert sizes(roles.actor) == sizes(roles.ref) == sizes(config.critic) == (4, 2, 2)
    assert roles.actor.strategy == "fsdp2"
    (engine,) = [note for note in notes if "strategy=megatron" in note]
    assert "PyTorch's own engine" in engine and "not Megatron-LM" in engine
    assert any(
        note == "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size is now "
        "actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size"
        for note in notes
    )


def test_the_command_of_a_mixture_of_experts() -> None:
    config, notes = loaded(MOE_GRPO, *FLAGS)
    actor = config.actor_rollout_ref.actor
    assert sizes(actor) == (1, 2, 1) and actor.fsdp_config.expert_parallel_size == 2
    assert actor.fsdp_config.param_offload and actor.fsdp_config.optimizer_offload
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload
    assert any("recompute_granularity=full has no effect: model.enable_gradient" in note for note in notes)
    assert any("moe_router_dtype=fp32 has no effect" in note for note in notes)


def test_context_parallel_ranks_share_rows() -> None:
    config, notes = loaded(CONTEXT)
    assert config.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 2
    assert sizes(config.actor_rollout_ref.actor) == (1, 2, 1)
    assert any(
        "critic.strategy=megatron has no effect: the engine is PyTorch's own" in note for note in notes
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("pipeline_model_parallel_size=3", "pipeline_parallel_size=3 does not divide the 4 processes"),
        ("virtual_pipeline_model_parallel_size=2", "virtual_pipeline_parallel_size=2 without stages"),
        (
            "pipeline_model_parallel_size=2 {block}.tensor_model_parallel_size=4",
            "tensor_parallel_size=4 does not divide the 2 processes of each of the 2 stages",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_processes(words: str, wanted: str) -> None:
    block = "actor_rollout_ref.actor.megatron"
    config, _ = loaded(f"trainer.n_gpus_per_node=4 {block}.{words.format(block=block)}")
    assert any(wanted in problem for problem in ppo_cluster_problems(config))
