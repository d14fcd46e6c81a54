"""The same training on one rank and on two: what is built, what it is fed, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_zoo import tiny_llama, training_rows
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.config.root import CriticConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.distributed.shards import is_absent
from hybridflow.engines import BatchLimits, LossFn, OutputSpec
from hybridflow.engines.build import build_engine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import TrainingError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.losses import critic_loss, find_policy_loss, policy_loss

OPTIM = OptimConfig(lr=3e-3, eps=1e-5)
"""A gradient that is nothing but rounding must not become a step of full size."""
EVEN = ((0, 2, 4, 6), (1, 3, 5))


@dataclass(frozen=True)
class Run:
    """One training of the tiny model: how it is spread, and how rows are dealt."""

    folder: str
    kind: Any = "policy"
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    sizes: dict[str, int] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    """The dtype of the columns of the rows."""
    deal: tuple[tuple[int, ...], ...] = EVEN
    """Rows of each part."""
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(24))
    steps: int = 2
    activation_offload: bool = False
    lora: LoraSettings | None = None
    grad_clip: float | None = 0.5
    optim: OptimConfig | None = OPTIM


def save_tiny(folder: Path, *, tied: bool, layers: int = 2) -> str:
    """A model folder, its weights in several files with an index where they are not tied."""
    model = tiny_llama(tied=tied, seed=3, layers=layers)
    with torch.no_grad():
        # norms that are not all ones, so that a mix-up shows
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    model.save_pretrained(folder, **({} if tied else {"max_shard_size": "12KB"}))
    return str(folder)


def build(run: Run, world_size: int) -> FSDPEngine:
    arguments = {
        "path": run.folder,
        "device": torch.device("cpu"),
        "dtype": "auto",
        "gradient_checkpointing": False,
        "probe": False,
        **run.model,
    }
    torch.manual_seed(0)  # a value head is given weights below
    engine = build_engine(
        run.kind,
        arguments,
        name="actor",
        optim=run.optim,
        grad_clip=run.grad_clip,
        fsdp=run.fsdp,
        layout=ParallelLayout.from_keys(world_size, **run.sizes) if world_size > 1 else ParallelLayout(),
        activation_offload=run.activation_offload,
        lora=run.lora,
    )
    if run.kind != "policy":
        state = engine.state_dict()["model"]
        head = torch.randn(state["head.weight"].shape, generator=torch.Generator().manual_seed(5)) * 0.1
        head = head.to(state["head.weight"].dtype)
        engine.load_state_dict({"model": {**state, "head.weight": head}})
    return engine


def spec(run: Run) -> OutputSpec:
    if run.kind == "value":
        return OutputSpec(values=True)
    if run.kind != "policy":
        return OutputSpec(scores=True)
    return OutputSpec(log_probs=True, entropy=True, temperature=0.8)


def loss_of(run: Run, rows: DataProto) -> LossFn:
    """Normalised by the counts of all rows."""
    scale = LossScale.count(rows.batch["loss_mask"])
    config = ActorConfig(entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
    if run.kind == "policy":
        return policy_loss(config, scale, find_policy_loss(config))
    loss = critic_loss(CriticConfig(), scale, None)
    return lambda answers, micro: loss({"values": next(iter(answers.values()))}, micro)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def dealt(run: Run, engine: FSDPEngine) -> tuple[DataProto, LossFn]:
    """This rank's rows, and the loss over everyone's."""
    rows = training_rows(dtype=run.dtype)
    part = run.deal[engine.layout.data_rank(rank_and_size()[0])]
    return rows.select_idxs(list(part)), loss_of(
        run, rows.select_idxs(sorted(row for part in run.deal for row in part))
    )


def weights_of(engine: FSDPEngine) -> dict[str, Tensor]:
    """Without those of other stages."""
    model = engine.state_dict()["model"]
    return {name: whole(tensor) for name, tensor in model.items() if not is_absent(tensor)}


def train(rank: int, run: Run, world_size: int = 2) -> dict[str, Any]:
    """Log-probs or values before, `steps` optimizer steps, and what came of them; run it on each rank, or
    with world_size 1 alone.
    """
    engine = build(run, world_size)
    return go(engine, rank, run, world_size)


def train_on_nothing(rank: int, run: Run, world_size: int = 2) -> str:
    """What is said of a loss that has a gradient, but none of the model's."""
    engine = build(run, world_size)
    before = weights_of(engine)
    batch, _ = dealt(run, engine)

    def unrelated(outputs: dict[str, Tensor], micro: DataProto) -> Any:
        return torch.ones((), requires_grad=True) * 2.0, Metrics()

    try:
        engine.train_mini_batch(batch, spec(run), unrelated, run.limits)
    except TrainingError as error:
        after = weights_of(engine)
        assert all(torch.equal(after[name], before[name]) for name in before)
        return str(error)
    return "it went on"


def go(engine: FSDPEngine, rank: int, run: Run, world_size: int) -> dict[str, Any]:
    everyone = sorted(row for part in run.deal for row in part)
    part = everyone if world_size == 1 else run.deal[engine.layout.data_rank(rank_and_size()[0])]
    rows = training_rows(dtype=run.dtype)
    batch, loss = rows.select_idxs(list(part)), loss_of(run, rows.select_idxs(everyone))
    shares: list[Tensor] = []
    tokens: list[Tensor] = []

    def noting(outputs: dict[str, Tensor], micro: DataProto) -> Any:  # without a wait for a device
        tokens.append(micro.batch["attention_mask"].sum())
        share, metrics = loss(outputs, micro)
        shares.append(share.detach())
        return share, metrics

    before = engine.forward(batch, spec(run), run.limits)
    metrics, losses = [], []
    for _ in range(run.steps):
        shares.clear()
        metrics.append(engine.train_mini_batch(batch, spec(run), noting, run.limits).to_floats())
        losses.append(sum(map(float, shares)))
    assert all(int(number) <= run.limits.max_tokens for number in tokens)
    return {
        "rows": list(part),
        "before": before,
        "losses": losses,
        "metrics": metrics,
        "weights": weights_of(engine),
        "state": {
            name: {key: whole(value) for key, value in entry.items()}
            for name, entry in engine.state_dict()["optimizer"].items()
            if not is_absent(entry["exp_avg"])
        },
        "requires_grad": {
            name: parameter.requires_grad for name, parameter in engine.module.named_parameters()
        },
        "shapes": {
            name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
            for name, p in engine.module.named_parameters()
            if not is_absent(p)
        },
    }
