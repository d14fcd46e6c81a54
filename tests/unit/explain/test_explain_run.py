"""What `config --explain` says of processes, rows and memory is what the run will do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import Line, format_bytes
from hybridflow.config.load import prepare_config
from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.shards import local
from hybridflow.engines.build import build_engine
from hybridflow.errors import ConfigError
from hybridflow.explain.run import explain_run
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.copies.quantized_copy import QuantizedCopy
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.size import size_of
from hybridflow.models.tiny import create_tiny_model
from hybridflow.planner.memory import Needs, RoleEngine, engine_needs
from picture_models import create_tiny_vlm
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


def lines_of(tiny: Path, *overrides: str) -> list[Line]:
    config = prepare_config(PPOConfig, [*STEP, f"actor_rollout_ref.model.path='{tiny}'", *overrides]).config
    lines = explain_run(config)
    assert all(line.how for line in lines) and len({line.label for line in lines}) == len(lines)
    return lines


def shown(tiny: Path, *overrides: str) -> dict[str, str]:
    return {line.label: line.value for line in lines_of(tiny, *overrides)}


def whole(tiny: Path) -> int:
    return LAYERS * BLOCK + HIDDEN * vocabulary(tiny) + HIDDEN


CASES = """
one process: trainer.device=cpu
device and dtype: cpu, float32 (trainer.device=cpu: memory is estimated for it; set trainer.device=cuda to
processes: 1 (
memory, actor: weights: {4 * W}
memory, actor: Adam moments: {8 * W}
memory, KV cache, at most: {256 * 256 * (2 * LAYERS + 1) * KV * HEAD * 4}
actor micro-batches per mini-batch, at most: 16
not worker processes|memory, actor: float32 masters|critic|reference|CPU memory

two rows at a time: actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor micro-batches per mini-batch, at most: 32

the data's own answer: algorithm.adv_estimator=spin actor_rollout_ref.actor.policy_loss.loss_mode=dpo
actor micro-batches per mini-batch, at most: 20

a critic and a reference: trainer.device=cuda algorithm.adv_estimator=gae algorithm.use_kl_in_reward=true
device and dtype: cuda, bfloat16 (trainer.device=cuda: memory is estimated for it)
memory, critic: float32 masters: {4 * (W + HIDDEN + 1)}
memory, reference: weights: {2 * W}
not CPU memory

two dtypes: algorithm.adv_estimator=gae critic.fsdp_config.mixed_precision.param_dtype=bfloat16
device and dtype: cpu, actor float32, critic bfloat16

a teacher: algorithm.adv_estimator=on_policy_distillation distillation.teacher_model.path=MODEL
memory, teacher: weights: {4 * W}
not memory, reference: weights

a process reward model: algorithm.adv_estimator=prime
memory, process reward model: Adam moments: {8 * W}
process reward model micro-batches per mini-batch, at most: 64

LoRA: actor_rollout_ref.model.lora_rank=4 algorithm.use_kl_in_reward=true
actor parameters in training: {f"{LORA:,} of {W + LORA:,}"}
memory, actor: Adam moments: {8 * LORA}
not memory, reference

LoRA, two ranks: actor_rollout_ref.model.lora_rank=4 algorithm.use_kl_in_reward=true trainer.n_gpus_per_node=2
reference is: the actor's module
memory of each process, actor: Adam moments: {4 * LORA}

LoRA with a reference elsewhere: actor_rollout_ref.model.lora_rank=4 algorithm.use_kl_in_reward=true \
trainer.resource_pools={train:[2],held:[1]} trainer.placement={reference:held}
memory of each process of held, reference: weights: {4 * W}
not reference is:

pools: trainer.resource_pools={train:[2,2],made:[2]} trainer.placement={rollout:made} \
actor_rollout_ref.rollout.tensor_model_parallel_size=2 algorithm.use_kl_in_reward=true
worker processes: 6
pool train: 4 processes
pool made: 2 processes
actor is spread over: 4 ranks (shards 4)
generation on pool made: 1 × 2 processes
responses generated per process, about: 256
actor rows per process and mini-batch, about: 16
actor micro-batches per mini-batch, at most: 4
memory of each process of train, actor: weights: {W}
memory of each process of made, KV cache, at most: {256 * 256 * (2 * LAYERS + 1) * HEAD * 4}
not memory of each process of made, actor

deltas: trainer.device=cuda trainer.resource_pools={train:[2],made:[1]} trainer.placement={rollout:made} \
actor_rollout_ref.rollout.delta_push=true
memory of each process of train, actor: weights sent last: {2 * W // 2}
CPU memory of each process of train: {2 * W // 2}

deltas that nothing sends: trainer.device=cuda actor_rollout_ref.rollout.delta_push=true
not memory, actor: weights sent last|CPU memory

shared tokens: trainer.n_gpus_per_node=4 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
actor rows per process and mini-batch, about: 32
actor is spread over: 4 ranks (shards 4, sequence 2)

offloaded: trainer.device=cuda actor_rollout_ref.actor.fsdp_config.param_offload=true \
actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
memory, actor: weights: {2 * W}
CPU memory: {(2 + 4 + 8) * W}

offloaded on a CPU: trainer.device=cpu actor_rollout_ref.actor.fsdp_config.param_offload=true \
actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
not CPU memory

the page's bytes, one device: trainer.device=cuda actor_rollout_ref.actor.use_kl_loss=true \
actor_rollout_ref.actor.fsdp_config.offload_policy=true actor_rollout_ref.ref.fsdp_config.param_offload=true
CPU memory: {(18 + 2) * W}

the page's bytes, two devices: trainer.device=cuda actor_rollout_ref.actor.use_kl_loss=true \
actor_rollout_ref.actor.fsdp_config.offload_policy=true actor_rollout_ref.ref.fsdp_config.param_offload=true \
trainer.n_gpus_per_node=2
CPU memory of each process: {(16 + 2) * W // 2}

a mixed rope: +actor_rollout_ref.model.override_config.rope_scaling.type=yarn \
+actor_rollout_ref.model.override_config.rope_scaling.factor=2
actor model: attention over packed rows by PyTorch's kernels; rope yarn (factor 2, \
original_max_position_embeddings 4096, rope_theta 10000); rows of up to 8192 tokens are generated; \
dtype float32
"""
"""Each case: its name and its overrides, beginnings of lines with bytes in braces, labels that are not.
`docs/models_and_memory.md` has the bytes of a weight: 16, 18 on one device, and 2 more for a reference.
"""


def in_words(value: str | int) -> str:
    return value if isinstance(value, str) else format_bytes(value)


@pytest.mark.parametrize("case", CASES.strip().split("\n\n"), ids=lambda case: case.partition(":")[0])
def test_what_is_said_of_a_run(case: str, tiny: Path) -> None:
    head, *wanted = case.splitlines()
    lines = lines_of(tiny, *head.partition(": ")[2].replace("MODEL", f"'{tiny}'").split())
    names = {**globals(), "W": whole(tiny)}
    printed = [f"{line.label}: {line.value} ({line.how})" for line in lines]
    for line in wanted:
        if line.startswith("not "):
            assert not any(each.startswith(tuple(line[4:].split("|"))) for each in printed), line
        else:
            text = re.sub(r"{(.+)}", lambda found: in_words(eval(found[1], names)), line)
            assert any(each.startswith(text) for each in printed), (text, printed)


def test_a_layout_that_cannot_be_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 does not divide num_key_value_heads=2"):
        shown(tiny, "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=4")


def test_a_supervised_run(tiny: Path) -> None:
    keys = ["data.task.name=arithmetic_chain", f"model.path='{tiny}'", "trainer.n_gpus_per_node=2"]
    config = prepare_config(SFTConfig, [*keys, "model.lora_rank=4"]).config
    said = {line.label: line.value for line in explain_run(config)}
    assert said["SFT rows per process and mini-batch, about"] == "128"
    assert said["SFT micro-batches per mini-batch, at most"] == "16"
    assert said["memory of each process, model: Adam moments"] == format_bytes(4 * LORA)


INT8 = ("actor_rollout_ref.rollout.quantization=int8", "algorithm.rollout_correction.rollout_is=token")


def test_rounded_weights(tiny: Path) -> None:
    said, layers = shown(tiny, *INT8), LAYERS * BLOCK
    assert said["memory, generation: rounded weights"] == format_bytes(layers)
    policy = build_policy(tiny, device="cpu", probe=False)
    quantized = QuantizedCopy(policy, "int8")
    quantized.refresh()
    assert layers < 1.05 * quantized.nbytes, "the estimate counts norms too, and no scales"
    assert quantized.nbytes < 1.2 * layers
    assert "memory, generation: whole weights" not in said, "they are the actor's"
    sharded = shown(tiny, *INT8, "trainer.n_gpus_per_node=2")
    of = "memory of each process"
    assert sharded[f"{of}, generation: whole weights"] == format_bytes(4 * whole(tiny))
    assert sharded[f"{of}, generation: weights that stay whole"] == format_bytes(4 * (whole(tiny) - layers))
    where = ("trainer.resource_pools={train: [1], made: [1]}", "trainer.placement={rollout: made}")
    apart = shown(tiny, *INT8, *where, "trainer.device=cuda")
    assert apart["memory of each process of made, generation: whole weights"] == format_bytes(2 * whole(tiny))


def test_a_judge_has_its_weights_and_its_cache_all_the_time(tiny: Path) -> None:
    judge = (
        "reward.reward_model.enable=true",
        "reward.reward_model.kind=generative",
        f"reward.reward_model.model.path={tiny}",
        "reward.reward_model.rollout.max_num_seqs=40",
        "reward.reward_model.rollout.max_model_len=1000",
        "reward.function=auto",
        "reward.terms=[{name: judge}]",
    )
    alone = shown(tiny)
    beside = shown(tiny, *judge)
    cache = next(line for line in lines_of(tiny, *judge) if line.label == "memory, judge: KV cache, at most")
    assert beside["memory, judge: weights"] == format_bytes(4 * whole(tiny))
    assert cache.how.startswith("40 rows × 1,000 tokens") and format_bytes(product(cache.how)) == cache.value
    assert alone["memory while generating"] != beside["memory while generating"]
    pools = ("trainer.resource_pools={main: [1], judges: [1]}", "trainer.placement={judge: judges}")
    apart = shown(tiny, *judge, *pools)
    assert apart["memory of each process of judges, judge: weights"] == format_bytes(4 * whole(tiny))
    assert apart["memory of each process of main while generating"] == alone["memory while generating"]


def product(how: str) -> float:
    """The number that an arithmetic such as `32 rows × (2 × 28 layers + 1 spare) × 2 bytes` comes to."""
    return float(eval(re.sub(r"[a-z,]", "", how).replace("×", "*")))


def test_the_arithmetic_of_the_cache_comes_to_its_bytes(tiny: Path) -> None:
    for device in ("cpu", "cuda"):
        lines = {line.label: line for line in lines_of(tiny, f"trainer.device={device}")}
        cache = lines["memory, KV cache, at most"]
        assert format_bytes(product(cache.how)) == cache.value, cache


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
