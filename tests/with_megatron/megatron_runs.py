"""The same training in megatron-core and in PyTorch's own engine: tiny models, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from engine_zoo import LENGTHS, training_rows
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.checkpoint.sharded import load_shards, save_shards
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.config.root import CriticConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.distributed.shards import is_absent
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.build import build_engine
from hybridflow.models.files.export import plain_weights
from hybridflow.models.value import ValueModel
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import critic_loss, find_policy_loss, policy_loss

SPEC = OutputSpec(log_probs=True, entropy=True, sum_pi_squared=True, temperature=0.8)
LIMITS = BatchLimits(24)
OPTIM = OptimConfig(lr=3e-3, eps=1e-5)
"""A gradient that is nothing but rounding must not become a step of full size."""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True, pad_token_id=padding()),
    "odd vocabulary": lambda: LlamaConfig(**{**SHAPE, "vocab_size": 67}),
    "llama3 rope": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe, raw": lambda: Qwen3MoeConfig(
        **SHAPE, **EXPERTS, norm_topk_prob=False, pad_token_id=padding()
    ),
    "four layers": lambda: LlamaConfig(
        **SHAPE | {"num_hidden_layers": 4}, tie_word_embeddings=True, pad_token_id=padding()
    ),
    "four layers of experts": lambda: Qwen3MoeConfig(**SHAPE | {"num_hidden_layers": 4}, **EXPERTS),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}


def padding() -> int:
    """A token that rows have, as one that a policy has sampled: its embedding gets no gradient."""
    return int(training_rows().batch["input_ids"][0, -LENGTHS[0][1] - 3])


@dataclass(frozen=True)
class Setting:
    """A model, the way in which ranks divide it, and who trains it."""

    folder: str
    strategy: str = "megatron"
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the layout, and the number of `parts` of each stage."""
    recompute: bool = False
    context: Literal["ulysses", "ring"] = "ulysses"
    kind: Literal["policy", "value"] = "policy"
    dtype: str = "auto"
    optim: OptimConfig | None = OPTIM


def save_model(folder: Path, family: str, kind: Any = AutoModelForCausalLM) -> str:
    """A model folder whose norms and biases are not what a mix-up would leave unseen."""
    config = FAMILIES[family]()
    config.num_labels = 1  # of a classifier
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return str(folder)


def build(setting: Setting) -> Any:
    world_size = rank_and_size()[1]
    sizes = {"parts": 1} | setting.sizes
    parts = sizes.pop("parts")
    return build_engine(
        setting.kind,
        {
            "path": setting.folder,
            "device": torch.device("cpu"),
            "dtype": setting.dtype,
            "gradient_checkpointing": setting.recompute,
            "probe": False,
        },
        name="actor",
        optim=setting.optim,
        grad_clip=0.5,
        fsdp=FSDPConfig(context_parallel=setting.context, virtual_pipeline_parallel_size=parts),
        layout=ParallelLayout.from_keys(world_size, **sizes),
        strategy=setting.strategy,
    )


def part_of(engine: Any) -> tuple[DataProto, Any]:
    """This rank's rows, and the loss over everyone's."""
    rows = training_rows(dtype=torch.float32)
    scale = LossScale.count(rows.batch["loss_mask"])
    parts = engine.layout.data
    own = rows.select_idxs(list(range(len(LENGTHS)))[engine.layout.data_rank(rank_and_size()[0]) :: parts])
    if isinstance(engine.module, ValueModel):
        return own, critic_loss(CriticConfig(), scale, None)
    config = ActorConfig(entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
    return own, policy_loss(config, scale, find_policy_loss(config))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in state.items() if not is_absent(tensor)}


def go(engine: Any, steps: int) -> dict[str, Any]:
    """Train, and return what this rank has seen of it: it counts where the layout returns."""
    rows, loss = part_of(engine)
    spec = OutputSpec(values=True) if isinstance(engine.module, ValueModel) else SPEC
    found: dict[str, Any] = {"before": engine.forward(rows, spec, LIMITS), "losses": [], "norms": []}
    shares: list[float] = []

    def noting(outputs: dict[str, Tensor], micro: DataProto) -> Any:
        share, metrics = loss(outputs, micro)
        shares.append(float(share.detach()))
        return share, metrics

    for _ in range(steps):
        shares.clear()
        metrics = engine.train_mini_batch(rows, spec, noting, LIMITS).to_floats()
        found["losses"].append(sum(shares))
        found["norms"] += [value for name, value in metrics.items() if name == "actor/grad_norm"]
    found["after"] = engine.forward(rows, spec, LIMITS)
    state = engine.state_dict()
    found["weights"] = held(state["model"])
    found["moments"] = {
        name: held(entry) for name, entry in state["optimizer"].items() if not is_absent(entry["exp_avg"])
    }
    found["returns"] = engine.layout.returns(rank_and_size()[0])
    return found


def train(rank: int, setting: Setting, steps: int = 5) -> dict[str, Any]:
    return go(build(setting), steps)


def save(rank: int, setting: Setting, folder: str, steps: int = 2) -> dict[str, Any]:
    """Train, save the state, and go on."""
    engine = build(setting)
    go(engine, steps)
    save_shards(Path(folder), engine.state_dict())
    return go(engine, 2)


def resume(rank: int, setting: Setting, folder: str) -> dict[str, Any]:
    """Go on from a saved state, with the learning rate's place in its schedule."""
    engine = build(setting)
    engine.load_state_dict(load_shards(Path(folder), engine.state_dict()))
    assert engine.num_steps == 2
    return go(engine, 2)


def read_and_export(rank: int, setting: Setting, folder: str) -> tuple[dict[str, Tensor], int]:
    """Weights as an engine that holds its own is sent them, and the number of parts that this rank holds."""
    engine = build(setting)
    engine.export_hf(folder)
    with engine.readable_policy():
        sent = {name: tensor.clone() for name, tensor in plain_weights(engine.policy)}
    held_here = {each.name: each for each in engine.held_weights()}
    assert list(held_here) == [name for name, _ in engine.policy.named_parameters()]
    for each in held_here.values():
        assert tuple(each.tensor.shape) == each.box.shape or not each.box.numel
    return sent, sum(each.box.numel > 0 for each in held_here.values())
