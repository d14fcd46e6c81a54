"""verl's documented commands for Megatron, but for sizes and models, and what they mean here."""

from __future__ import annotations

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.checks.cluster import ppo_cluster_problems
from hybridflow.config.load import load_config
from hybridflow.config.resolve import resolve
from verl_commands import DENSE_PPO, FLAGS, MOE_DAPO, MOE_GRPO

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
    assert sizes(roles.actor) == sizes(roles.ref) == sizes(config.critic) == (4, 4, 2)
    assert roles.actor.strategy == "fsdp2" and not list(ppo_cluster_problems(config))
    (engine,) = [note for note in notes if "strategy=megatron" in note]
    assert "PyTorch's own engine" in engine and "not Megatron-LM" in engine
    assert any(
        note == "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size is now "
        "actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size"
        for note in notes
    )


@pytest.mark.parametrize(
    ("command", "sliced", "stages", "experts"), [(MOE_GRPO, 4, 2, 4), (MOE_DAPO, 1, 1, 8)]
)
def test_commands_of_mixtures_of_experts(command: str, sliced: int, stages: int, experts: int) -> None:
    config, notes = loaded(command, *FLAGS)
    roles = config.actor_rollout_ref
    for role in (roles.actor, roles.ref):
        assert sizes(role) == (sliced, stages, 1) and role.fsdp_config.expert_parallel_size == experts
    assert not list(ppo_cluster_problems(config))
    if command == MOE_DAPO:
        assert roles.actor.fsdp_config.param_offload and roles.actor.fsdp_config.optimizer_offload
        assert roles.ref.fsdp_config.param_offload
        assert any("moe_router_dtype=fp32 has no effect" in note for note in notes)
        assert any("optimizer_cpu_offload=true has no effect: optimizer_offload" in note for note in notes)


def test_recomputing_is_the_models_own_key() -> None:
    block = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    words = f"{block}.recompute_granularity=full {block}.recompute_num_layers=1"
    config, notes = loaded(words)
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing
    assert any("recompute_granularity=full has no effect: model.enable_gradient" in note for note in notes)


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
