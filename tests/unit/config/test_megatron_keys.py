"""verl's documented commands for Megatron, but for sizes and models, and what they mean here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.checks import cluster
from hybridflow.config.layout import num_processes
from hybridflow.config.load import load_config, prepare_config
from hybridflow.config.resolve import resolve
from hybridflow.errors import ConfigError
from hybridflow.trainer.roles.parallel_layout import rollout_axes
from verl_commands import DENSE_GRPO, DENSE_PPO, FLAGS, MOE_DAPO, MOE_GRPO, SGLANG

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


@pytest.mark.parametrize(
    ("command", "ranks", "more"),
    [
        (DENSE_GRPO, 2, ()),
        (DENSE_GRPO, 2, (SGLANG,)),
        (DENSE_PPO, 4, FLAGS),
        (MOE_GRPO, 4, FLAGS),
        (MOE_DAPO, 4, FLAGS),
    ],
    ids=["grpo-vllm", "grpo-sglang", "ppo-megatron", "moe-grpo-megatron", "moe-dapo-megatron"],
)
def test_a_stock_command_runs_with_other_paths_only(
    base: list[str], command: str, ranks: int, more: tuple[str, ...]
) -> None:
    """Nothing is refused, and one engine serves as many devices as the command says."""
    path = next(word.partition("=")[2] for word in base if word.startswith("actor_rollout_ref.model.path"))
    shape: dict[str, object] = {"model_type": "qwen2"}
    if "expert_model_parallel_size" in command:
        shape = {"model_type": "qwen3_moe", "num_experts": 128, "num_hidden_layers": 48}
    (Path(path) / "config.json").write_text(json.dumps(shape))
    config = prepare_config(PPOConfig, [*command.split(), *base, *more]).config
    rollout = config.actor_rollout_ref.rollout
    assert rollout.tensor_model_parallel_size == ranks and rollout.name in ("vllm", "sglang")
    world = num_processes(config.trainer)
    assert rollout_axes(config, world) == (("dp", world // ranks), ("tp", ranks))


def test_the_dense_command() -> None:
    config, notes = loaded(DENSE_PPO, *FLAGS)
    roles = config.actor_rollout_ref
    assert sizes(roles.actor) == sizes(roles.ref) == sizes(config.critic) == (4, 4, 2)
    assert roles.actor.strategy == "fsdp2" and not [line for rule in cluster.RULES for line in rule(config)]
    engines = [note for note in notes if "strategy=megatron" in note]
    assert [note.partition("=")[0] for note in engines] == [
        "actor_rollout_ref.actor.strategy",
        "critic.strategy",
    ]
    assert all("PyTorch's own engine" in note and "not Megatron-LM" in note for note in engines)
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
    assert not [line for rule in cluster.RULES for line in rule(config)]
    if command == MOE_DAPO:
        assert roles.model.override_config == {"max_position_embeddings": 10240}
        assert roles.actor.fsdp_config.param_offload and roles.actor.fsdp_config.optimizer_offload
        assert roles.ref.fsdp_config.param_offload
        assert any("moe_router_dtype=fp32 has no effect" in note for note in notes)
        assert any("optimizer_cpu_offload=true} have no effect: optimizer_offload" in note for note in notes)


RECOMPUTE = "megatron.override_transformer_config.recompute"


@pytest.mark.parametrize(
    ("granularity", "recomputes"), [("full", True), ("null", False), ("selective", True)]
)
def test_recomputing_whole_layers_is_the_models_own_key(granularity: str, recomputes: bool) -> None:
    words = f"+actor_rollout_ref.actor.{RECOMPUTE}_granularity={granularity}"
    config, notes = loaded(words, f"critic.model.enable_gradient_checkpointing={str(not recomputes).lower()}")
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing == recomputes
    assert config.critic.model.enable_gradient_checkpointing != recomputes
    assert loaded(words.replace("actor_rollout_ref.actor", "critic"))[0].critic.model == replace(
        PPOConfig().critic.model, enable_gradient_checkpointing=recomputes
    )
    said = [note for note in notes if "recompute_granularity" in note]
    if granularity == "selective":
        assert len(said) == 1 and "has no effect: model.enable_gradient_checkpointing, on by" in said[0]
    else:
        assert len(said) == 1
        assert said[0].endswith(
            f"is now actor_rollout_ref.model.enable_gradient_checkpointing={str(recomputes).lower()}"
        )


def test_the_last_of_two_names_for_recomputing_counts() -> None:
    full = f"actor_rollout_ref.actor.{RECOMPUTE}_granularity=full"
    off = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    for words, recomputes in ((f"{off} {full}", True), (f"{full} {off}", False)):
        config, notes = loaded(words)
        assert config.actor_rollout_ref.model.enable_gradient_checkpointing == recomputes
        assert any("both set actor_rollout_ref.model.enable_gradient_checkpointing" in note for note in notes)


def test_other_keys_of_recomputing_change_nothing() -> None:
    actor = f"actor_rollout_ref.actor.{RECOMPUTE}"
    words = (
        f"{actor}_method=block {actor}_num_layers=2 {actor}_modules=[core_attn] "
        f"actor_rollout_ref.ref.{RECOMPUTE}_granularity=null"
    )
    config, notes = loaded(words)
    assert config == loaded("")[0]
    assert sum("no effect" in note for note in notes) == 3
    (ways,) = [note for note in notes if "with recompute_granularity=full" in note]
    assert "{recompute_method=block, recompute_num_layers=2} have no effect: " in ways
    assert any("a model that is not trained keeps no activations" in note for note in notes)
    with pytest.raises(ConfigError, match="set full"):
        loaded(f"{actor}_granularity=half")


def test_context_parallel_ranks_share_rows() -> None:
    config, notes = loaded(CONTEXT)
    assert config.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 2
    assert sizes(config.actor_rollout_ref.actor) == (1, 2, 1)
    assert config.critic.strategy == "fsdp2"
    assert any(note.startswith("critic.strategy=megatron: ") and "not Megatron-LM" in note for note in notes)
