"""`kl_loss_type=full`: updates compute the reference's distributions, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model
from torch.distributed.tensor import DTensor

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.build import build_engine
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.workers.reference import ReferenceHead
from ranks import Ranks

ACTOR = "actor_rollout_ref.actor"
FULL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_coef=0.5")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("other") / "model", hidden=48, layers=1, seed=3)


@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_is_the_mean_kl_over_the_vocabulary(model: Path, tmp_path: Path, lora: bool) -> None:
    settings = [*FULL, f"{ACTOR}.ppo_epochs=2"]
    if lora:
        settings += ["actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=1e-2"]
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        _, first = trainer.step(trainer.source.next(1).rows, 1)
        _, second = trainer.step(trainer.source.next(2).rows, 2)
    before, after = (metrics.to_floats()["actor/kl_loss"] for metrics in (first, second))
    assert 0 <= before < after, "the actor leaves the reference"


def engine_of(folder: str, world_size: int, *, trained: bool, lora: LoraSettings | None = None) -> Any:
    layout = ParallelLayout.from_keys(world_size) if world_size > 1 else ParallelLayout()
    return build_engine(
        "policy",
        {"path": folder, "device": "cpu", "dtype": "float64", "probe": False, "gradient_checkpointing": True},
        name="actor",
        optim=OptimConfig(lr=1e-3) if trained else None,
        fsdp=FSDPConfig(),
        layout=layout,
        lora=lora,
    )


def kl_steps(
    rank: int, folder: str, other: str, world_size: int, lora: bool
) -> tuple[float, list[torch.Tensor]]:
    """The summed KL of the last of three steps, and the weights after it."""
    adapters = LoraSettings(rank=4) if lora else None
    actor = engine_of(folder, world_size, trained=True, lora=adapters)
    if lora:
        actor.policy.reference = ReferenceHead(actor, adapted=True)
    else:
        actor.policy.reference = ReferenceHead(engine_of(other, world_size, trained=False))
    rows = DataProto.from_dict(
        make_rows([[5, 6], [7], [8, 9, 4], [6]], [[4, 5], [9] * 5, [7], [5, 8]], pad_id=0)
    )
    mine = rows.select_idxs([0, 1, 2, 3][rank::world_size])
    total = []

    def loss(answers: dict[str, torch.Tensor], micro: DataProto) -> Any:
        kl = (answers["full_kl"] * micro.batch["response_mask"]).sum()
        total.append(float(kl.detach()))
        return kl - 0.1 * answers["log_probs"].sum(), Metrics()

    for _ in range(3):
        total.clear()
        actor.train_mini_batch(mine, OutputSpec(log_probs=True, full_kl=True), loss, BatchLimits(12))
    weights = [x.full_tensor() if isinstance(x, DTensor) else x for x in actor.module.parameters()]
    return sum(total), [x.detach().clone() for x in weights]


@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_compute_it_as_one(two_ranks: Ranks, model: Path, other: Path, lora: bool) -> None:
    one, weights = kl_steps(0, str(model), str(other), 1, lora)
    both = two_ranks.run(kl_steps, str(model), str(other), 2, lora)
    assert one > 1e-5 and abs(sum(kl for kl, _ in both) - one) < 1e-9
    for _, theirs in both:
        assert all(torch.allclose(a, b, atol=1e-9, rtol=0) for a, b in zip(weights, theirs, strict=True))
