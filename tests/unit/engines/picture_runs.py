"""Training with pictures on one rank and on two: what is fed, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.build import build_engine
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.files.build import build_policy
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from picture_models import picture_prompt, rows_with_media

ASK = OutputSpec(log_probs=True, entropy=True)
LIMITS = BatchLimits(30)


@dataclass(frozen=True)
class PictureRun:
    """Two optimizer steps on rows of which the first two have pictures."""

    folder: str
    deal: tuple[tuple[int, ...], ...]
    """Rows of each rank."""
    lora: bool = False
    freeze: bool = False
    reshard: bool = True


def rows_of(run: PictureRun) -> DataProto:
    policy = build_policy(run.folder, device="cpu", probe=False)
    prompts = [picture_prompt(policy, picture) for picture in (1, 2)]
    prompts += [type(prompts[0])((5, 6, 7)), type(prompts[0])((8, 9))]
    return rows_with_media(prompts, [[30, 31, 32], [33], [34, 35], [36, 37, 38]])


def train(rank: int, run: PictureRun, world_size: int) -> dict[str, Any]:
    layout = ParallelLayout()
    if world_size > 1:
        layout = ParallelLayout.from_keys(world_size)
    engine = build_engine(
        "policy",
        {"path": run.folder, "device": torch.device("cpu"), "probe": world_size > 1},
        name="actor",
        optim=OptimConfig(lr=1e-3, eps=1e-5),
        fsdp=FSDPConfig(reshard_after_forward=run.reshard),
        layout=layout,
        lora=LoraSettings(rank=2) if run.lora else None,
        freeze_vision_tower=run.freeze,
    )
    rows = rows_of(run)
    part = list(range(4))
    if world_size > 1:
        part = list(run.deal[rank_and_size()[0]])
    batch = rows.select_idxs(part)

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        mask = micro.batch["response_mask"]
        return -((outputs["log_probs"] + 0.1 * outputs["entropy"]) * mask).sum() / 9, Metrics()

    before = engine.forward(batch, ASK, LIMITS)["log_probs"]
    metrics = [engine.train_mini_batch(batch, ASK, loss, LIMITS).to_floats() for _ in range(2)]
    weights = {name: _whole(tensor) for name, tensor in engine.module.named_parameters()}
    return {"rows": part, "before": before, "metrics": metrics, "weights": weights}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
