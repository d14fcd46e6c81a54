"""What `config --explain` says of processes, rows and memory is what the run will do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import format_bytes
from hybridflow.config.fsdp import FSDPConfig, MixedPrecisionConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.model import ModelConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.shards import local
from hybridflow.engines.build import build_engine
from hybridflow.errors import ConfigError
from hybridflow.explain.run import explain_run
from hybridflow.models.build import build_policy
from hybridflow.models.lora import LoraSettings
from hybridflow.models.rounded_twin import RoundedTwin
from hybridflow.models.size import size_of
from hybridflow.models.tiny import create_tiny_model
from hybridflow.models.tiny_vlm import create_tiny_vlm
from hybridflow.planner.memory import Needs, RoleEngine, engine_needs
from ranks import Ranks

STEP = [
    "data.task.name=arithmetic_chain",
    "data.train_batch_size=64",
    "data.max_prompt_length=100",
    "data.max_response_length=156",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "algorithm.adv_estimator=grpo",
]
LAYERS, HIDDEN, MLP, KV, HEAD = 2, 64, 128, 2, 16
BLOCK = HIDDEN * HIDDEN * 2 + HIDDEN * KV * HEAD * 2 + 3 * HIDDEN * MLP + 2 * HIDDEN
"""Parameters of a block of the tiny model: attention, MLP, two norms."""
LORA = LAYERS * 4 * (4 * HIDDEN + 2 * (HIDDEN + KV * HEAD) + 3 * (HIDDEN + MLP))
"""Those of adapters of rank 4 on all linear layers."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return create_tiny_model(folder, hidden=HIDDEN, layers=LAYERS, heads=4, kv_heads=KV, intermediate=MLP)


def vocabulary(folder: Path) -> int:
    return size_of(
        "policy", ModelConfig(path=str(folder)), dtype="float32", device=torch.device("cpu")
    ).vocab_size


def shown(tiny: Path, *overrides: str) -> dict[str, str]:
    config = prepare_config(PPOConfig, [*STEP, f"actor_rollout_ref.model.path='{tiny}'", *overrides]).config
    lines = explain_run(config)
    assert all(line.how for line in lines) and len({line.label for line in lines}) == len(lines)
    return {line.label: line.value for line in lines}


def whole(tiny: Path) -> int:
    return LAYERS * BLOCK + HIDDEN * vocabulary(tiny) + HIDDEN


def test_one_process(tiny: Path) -> None:
    said, count = shown(tiny), whole(tiny)
    assert said["processes"] == "1" and "worker processes" not in said
    assert said["memory, actor: weights"] == format_bytes(4 * count)
    assert "memory, actor: float32 masters" not in said
    assert said["memory, actor: Adam moments"] == format_bytes(8 * count)
    assert said["memory, KV cache, at most"] == format_bytes(256 * 256 * (2 * LAYERS + 1) * KV * HEAD * 4)
    # 16 × 4 rows, 1024 // 256 = 4 rows at a time
    assert said["actor micro-batches per mini-batch, at most"] == "16"
    assert not any("critic" in label or "reference" in label for label in said)
    assert (
        shown(tiny, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2")[
            "actor micro-batches per mini-batch, at most"
        ]
        == "32"
    )
    spin = shown(tiny, "algorithm.adv_estimator=spin", "actor_rollout_ref.actor.policy_loss.loss_mode=dpo")
    assert spin["actor micro-batches per mini-batch, at most"] == "20"  # 16 × 5 rows, 4 at a time


INT8 = ("actor_rollout_ref.rollout.quantization=int8", "algorithm.rollout_correction.rollout_is=token")


def test_rounded_weights(tiny: Path) -> None:
    said, layers = shown(tiny, *INT8), LAYERS * BLOCK
    assert said["memory, generation: rounded weights"] == format_bytes(layers)
    policy = build_policy(tiny, device="cpu", probe=False)
    twin = RoundedTwin(policy, "int8")
    twin.take()
    assert layers < 1.05 * twin.nbytes, "the estimate counts norms too, and no scales"
    assert twin.nbytes < 1.2 * layers
    assert "memory, generation: whole weights" not in said, "they are the actor's"
    sharded = shown(tiny, *INT8, "trainer.n_gpus_per_node=2")
    of = "memory of each process"
    assert sharded[f"{of}, generation: whole weights"] == format_bytes(4 * whole(tiny))
    assert sharded[f"{of}, generation: weights that stay whole"] == format_bytes(4 * (whole(tiny) - layers))
    where = ("trainer.resource_pools={train: [1], made: [1]}", "trainer.placement={rollout: made}")
    apart = shown(tiny, *INT8, *where, "trainer.device=cuda")
    assert apart["memory of each process of made, generation: whole weights"] == format_bytes(2 * whole(tiny))


@pytest.mark.parametrize(("ranks", "each"), [(1, 18), (2, 16)])
def test_offloaded_bytes_of_a_weight_are_those_of_the_page(tiny: Path, ranks: int, each: int) -> None:
    """docs/models_and_memory.md: 16 bytes for a trained weight, 18 on one device, 2 more for a reference."""
    said = shown(
        tiny,
        "trainer.device=cuda",
        f"trainer.n_gpus_per_node={ranks}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.fsdp_config.offload_policy=true",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    )
    of = " of each process" if ranks > 1 else ""
    wanted = format_bytes((each + 2) * whole(tiny) // ranks)
    assert said[f"CPU memory{of}, offloaded"] == wanted


def product(how: str) -> float:
    """The number that an arithmetic such as `32 rows × (2 × 28 layers + 1 spare) × 2 bytes` comes to."""
    return float(eval(re.sub(r"[a-z,]", "", how).replace("×", "*")))


def test_the_arithmetic_of_the_cache_comes_to_its_bytes(tiny: Path) -> None:
    for device in ("cpu", "cuda"):
        keys = [*STEP, f"actor_rollout_ref.model.path='{tiny}'", f"trainer.device={device}"]
        lines = {line.label: line for line in explain_run(prepare_config(PPOConfig, keys).config)}
        cache = lines["memory, KV cache, at most"]
        assert format_bytes(product(cache.how)) == cache.value, cache


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_first_line_names_device_and_dtype(tiny: Path, device: str, dtype: str) -> None:
    keys = [*STEP, f"actor_rollout_ref.model.path='{tiny}'", f"trainer.device={device}"]
    first = explain_run(prepare_config(PPOConfig, keys).config)[0]
    assert (first.label, first.value) == ("device and dtype", f"{device}, {dtype}")
    assert f"trainer.device={device}" in first.how and ("plan for a GPU" in first.how) == (device == "cpu")


def test_roles_of_different_dtypes_are_named(tiny: Path) -> None:
    said = shown(
        tiny, "algorithm.adv_estimator=gae", "critic.fsdp_config.mixed_precision.param_dtype=bfloat16"
    )
    assert said["device and dtype"] == "cpu, actor float32, critic bfloat16"


def test_what_is_in_force_in_a_model(tiny: Path) -> None:
    override = "actor_rollout_ref.model.override_config"
    said = shown(tiny, f"+{override}.rope_scaling.type=yarn", f"+{override}.rope_scaling.factor=2")
    assert "rope yarn (factor 2, original_max_position_embeddings 4096" in said["actor model"]
    assert "rows of up to 8192 tokens" in said["actor model"] and "dtype float32" in said["actor model"]


def test_masters_and_other_roles(tiny: Path) -> None:
    said, count = (
        shown(tiny, "trainer.device=cuda", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
        whole(tiny),
    )
    assert said["memory, critic: float32 masters"] == format_bytes(4 * (count + HIDDEN + 1))
    assert said["memory, reference: weights"] == format_bytes(2 * count)
    said = shown(
        tiny, "algorithm.adv_estimator=on_policy_distillation", f"distillation.teacher_model.path='{tiny}'"
    )
    assert said["memory, teacher: weights"] == format_bytes(4 * count)
    assert "memory, reference: weights" not in said
    said = shown(tiny, "algorithm.adv_estimator=prime")
    assert said["memory, process reward model: Adam moments"] == format_bytes(8 * count)
    # 64 × 4 rows, 4 at a time
    assert said["process reward model micro-batches per mini-batch, at most"] == "64"


def test_lora_trains_little_and_has_no_second_model(tiny: Path) -> None:
    lora = ["actor_rollout_ref.model.lora_rank=4", "algorithm.use_kl_in_reward=true"]
    said = shown(tiny, *lora)
    assert said["actor parameters in training"] == f"{LORA:,} of {whole(tiny) + LORA:,}"
    assert said["memory, actor: Adam moments"] == format_bytes(8 * LORA)
    assert not any(label.startswith("memory, reference") for label in said)
    said = shown(tiny, *lora, "trainer.n_gpus_per_node=2")
    assert said["reference is"] == "the actor's module"
    assert said["memory of each process, actor: Adam moments"] == format_bytes(4 * LORA)
    said = shown(
        tiny, *lora, "trainer.resource_pools={train: [2], held: [1]}", "trainer.placement={reference: held}"
    )
    assert "reference is" not in said
    assert said["memory of each process of held, reference: weights"] == format_bytes(4 * whole(tiny))


def test_pools_roles_and_rows_of_a_process(tiny: Path) -> None:
    where = ["trainer.resource_pools={train: [2, 2], made: [2]}", "trainer.placement={rollout: made}"]
    said = shown(
        tiny,
        *where,
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "algorithm.use_kl_in_reward=true",
    )
    assert (said["worker processes"], said["pool train"], said["pool made"]) == (
        "6",
        "4 processes",
        "2 processes",
    )
    assert said["actor is spread over"] == "4 ranks (shards 4)"
    assert said["generation on pool made"] == "1 × 2 processes"
    assert said["responses generated per process, about"] == "256"
    assert said["actor rows per process and mini-batch, about"] == "16"
    assert said["actor micro-batches per mini-batch, at most"] == "4"
    assert said["memory of each process of train, actor: weights"] == format_bytes(whole(tiny))
    assert said["memory of each process of made, KV cache, at most"] == format_bytes(
        256 * 256 * (2 * LAYERS + 1) * HEAD * 4
    )
    assert not any("of made" in label and "actor" in label for label in said)
    said = shown(
        tiny, "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    )
    assert said["actor rows per process and mini-batch, about"] == "32"
    assert said["actor is spread over"] == "4 ranks (shards 4, sequence 2)"
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 does not divide num_key_value_heads=2"):
        shown(tiny, "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=4")


def test_offload_empties_the_device_and_moves_nothing_on_a_cpu(tiny: Path) -> None:
    keys = [f"actor_rollout_ref.actor.fsdp_config.{name}_offload=true" for name in ("param", "optimizer")]
    plain, moved = shown(tiny, "trainer.device=cuda"), shown(tiny, "trainer.device=cuda", *keys)
    assert plain["memory, actor: weights"] == moved["memory, actor: weights"]
    assert moved["CPU memory, offloaded"] == format_bytes((2 + 4 + 8) * whole(tiny))
    assert "CPU memory, offloaded" not in plain
    assert "CPU memory, offloaded" not in shown(tiny, *keys, "trainer.device=cpu")


def test_a_supervised_run(tiny: Path) -> None:
    keys = [
        "data.task.name=arithmetic_chain",
        f"model.path='{tiny}'",
        "trainer.n_gpus_per_node=2",
        "model.lora_rank=4",
    ]
    said = {line.label: line.value for line in explain_run(prepare_config(SFTConfig, keys).config)}
    assert said["SFT rows per process and mini-batch, about"] == "128"
    assert said["SFT micro-batches per mini-batch, at most"] == "16"
    assert said["memory of each process, model: Adam moments"] == format_bytes(4 * LORA)


def needs(tiny: Path, layout: ParallelLayout, fsdp: FSDPConfig, lora: LoraSettings | None) -> Needs:
    model = ModelConfig(path=str(tiny))
    dtype, many = fsdp.mixed_precision.param_dtype, layout.world_size > 1
    size = size_of(
        "policy", model, dtype=dtype, device=torch.device("cpu"), lora=lora, tensor=layout.tp, blocks=many
    )
    return engine_needs(RoleEngine("actor", layout, fsdp, model, True, 8, 64, 512), size, device="cpu")


def held(
    rank: int, folder: str, layout: ParallelLayout, fsdp: FSDPConfig, lora: LoraSettings | None
) -> tuple[int, int]:
    """Bytes of the weights and of the moments that this rank's engine has."""
    model: dict[str, Any] = {"path": folder, "device": torch.device("cpu"), "probe": False}
    engine = build_engine(
        "policy", model, name="actor", optim=OptimConfig(), fsdp=fsdp, layout=layout, lora=lora
    )
    assert engine.optimizer is not None
    weights = sum(
        local(parameter).numel() * parameter.element_size() for parameter in engine.module.parameters()
    )
    return weights, sum(
        2 * master.numel() * master.element_size() for master in engine.optimizer.masters.values()
    )


@pytest.mark.parametrize(
    ("fsdp", "lora"),
    [
        pytest.param(FSDPConfig(), None, id="sharded"),
        pytest.param(
            FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16")),
            LoraSettings(4),
            id="LoRA in bfloat16",
        ),
        pytest.param(FSDPConfig(fsdp_size=1), None, id="copies"),
        pytest.param(FSDPConfig(tensor_parallel_size=2), None, id="tensor parallel"),
    ],
)
def test_the_engine_of_a_rank_holds_what_was_said(
    two_ranks: Ranks, tiny: Path, fsdp: FSDPConfig, lora: LoraSettings | None
) -> None:
    layout = ParallelLayout.from_keys(2, fsdp.fsdp_size, 1, fsdp.tensor_parallel_size)
    parts = {part.label: part.size for part in needs(tiny, layout, fsdp, lora).parts}
    for weights, moments in two_ranks.run(held, str(tiny), layout, fsdp, lora):
        assert weights == pytest.approx(parts["weights"], rel=0.01)
        assert moments == pytest.approx(parts["Adam moments"], rel=0.01)


def test_the_engine_of_a_lone_process_holds_what_was_said(tiny: Path) -> None:
    fsdp = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16"))
    parts = {part.label: part.size for part in needs(tiny, ParallelLayout(), fsdp, LoraSettings(4)).parts}
    assert held(0, str(tiny), ParallelLayout(), fsdp, LoraSettings(4)) == (
        parts["weights"],
        parts["Adam moments"],
    )
    assert parts["float32 masters"] == 4 * LORA


@pytest.mark.parametrize("keys", [(), ("freeze_vision_tower=true",), ("lora_rank=4",)])
def test_a_vision_tower_has_a_line(keys: tuple[str, ...], tmp_path: Path) -> None:
    folder = create_tiny_vlm(tmp_path / "vlm", hidden=32)
    model = build_policy(folder, device="cpu", probe=False)
    assert model.vision is not None
    tower = sum(parameter.numel() for parameter in model.vision.tower.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    said = shown(folder, *(f"actor_rollout_ref.model.{key}" for key in keys))
    line = said["actor vision tower"]
    state = "frozen" if keys else "in training"
    assert line.startswith(f"{tower:,} of ") and line.endswith(f" parameters, {state}")
    if keys == ("freeze_vision_tower=true",):
        assert said["actor parameters in training"] == f"{count - tower:,} of {count:,}"
        assert said["memory, actor: Adam moments"] == format_bytes(8 * (count - tower))
