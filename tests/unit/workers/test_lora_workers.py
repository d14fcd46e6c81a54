"""Adapters in the workers: the actor learns, its base is the reference, a checkpoint holds only what learned;
the same on two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worker_house import rows

from hybridflow.checkpoint.shard_index import read_tensors
from hybridflow.checkpoint.sharded import load_shards, save_shards
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.controller import LocalBackend
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits
from hybridflow.engines.build import build_engine
from hybridflow.errors import CheckpointError
from hybridflow.models.adapters.lora import LoraSettings, is_adapter
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.workers import ActorGroup, ActorWorker, ReferenceGroup, ReferenceWorker
from hybridflow.workers.mini_batches import MiniBatchPlan
from ranks import Ranks

LIMITS = BatchLimits(max_tokens=40)
LORA = LoraSettings(rank=4, alpha=8, seed=1)
PLAN = MiniBatchPlan(groups=2, epochs=2, shuffle=True, seed=0, step=1)
OPTIM = OptimConfig(lr=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


def engine(folder: str | Path, ranks: int = 1, lora: LoraSettings | None = LORA) -> Any:
    layout, model = (
        ParallelLayout.from_keys(world_size=ranks),
        {"path": str(folder), "device": "cpu", "dtype": "float32", "probe": False},
    )
    return build_engine(
        "policy", model, name="actor", optim=OPTIM, grad_clip=1.0, fsdp=FSDPConfig(), layout=layout, lora=lora
    )


def groups(folder: str | Path, ranks: int = 1) -> tuple[ActorGroup, ReferenceGroup, Any]:
    whole = engine(folder, ranks)
    actor = ActorWorker(
        whole, ActorConfig(ppo_max_token_len_per_gpu=40), temperature=0.7, log_prob_limits=LIMITS
    )
    reference = ReferenceWorker(whole, temperature=0.7, limits=LIMITS, without_adapters=True)
    backend = LocalBackend(lambda host: {"actor": lambda info: actor, "reference": lambda info: reference})
    return ActorGroup(backend, "actor"), ReferenceGroup(backend, "reference"), whole


def learn(folder: str | Path, ranks: int = 1) -> tuple[dict[str, Tensor], Any]:
    """Columns before and after an update of the same rows, which on several ranks all of them have."""
    actor, reference, whole = groups(folder, ranks)
    batch = rows()
    if ranks > 1:  # the gradient is a sum over ranks
        batch.batch["advantages"] = batch.batch["advantages"] / ranks
    first = reference.log_probs(batch).batch["ref_log_prob"]
    batch |= actor.log_probs(batch)
    actor.update(batch, PLAN)
    said = {
        "first": first,
        "old": batch.batch["old_log_probs"],
        "last": reference.log_probs(batch).batch["ref_log_prob"],
    }
    return {**said, "new": actor.log_probs(batch).batch["old_log_probs"]}, whole


def test_the_base_is_the_reference_and_stands_still(folder: Path) -> None:
    said, whole = learn(folder)
    assert said["old"].equal(said["first"]), "a fresh adapter changes nothing"
    assert said["last"].equal(said["first"])
    assert float((said["new"] - said["old"]).abs().max()) > 1e-2, "the actor learned"
    state = whole.state_dict()
    assert (
        state["model"]
        and all(is_adapter(name) for name in state["model"])
        and state["optimizer"].keys() == state["model"].keys()
    )


def test_a_checkpoint_holds_the_adapters_and_goes_on(tmp_path: Path, folder: Path) -> None:
    said, whole = learn(folder)
    save_shards(tmp_path, whole.state_dict())
    assert all(is_adapter(name) for name in read_tensors(tmp_path, "model"))
    size = sum(path.stat().st_size for path in tmp_path.glob("model_*.safetensors"))
    assert size < (folder / "model.safetensors").stat().st_size / 2
    actor, _, other = groups(folder)
    other.load_state_dict(load_shards(tmp_path, other.state_dict()))
    assert actor.log_probs(rows()).batch["old_log_probs"].equal(said["new"])
    with pytest.raises(CheckpointError, match="other parameters than this actor"):
        engine(folder, lora=None).load_state_dict({"model": whole.state_dict()["model"]})


def learn_on_two(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    said, whole = learn(folder, ranks=2)
    return said, {name: tensor.full_tensor() for name, tensor in whole.state_dict()["model"].items()}


def test_two_ranks_learn_the_same(two_ranks: Ranks, folder: Path) -> None:
    (said, model), (_, other) = two_ranks.run(learn_on_two, str(folder))
    alone, whole = learn(folder)
    assert said["first"].equal(said["last"])
    for column in alone:
        assert torch.allclose(said[column], alone[column], atol=1e-5), column
    wanted = whole.state_dict()["model"]
    assert model.keys() == wanted.keys() and all(model[name].equal(other[name]) for name in model)
    assert all(torch.allclose(model[name], wanted[name], atol=1e-5) for name in wanted)


def forward_first(rank: int, folder: str) -> bool:
    """A sharded reference of no rows comes by, as on a rank that the dealing gave none."""
    _, reference, _ = groups(folder, ranks=2)
    batch: DataProto = rows()
    said = reference.log_probs(batch if rank == 0 else batch.select_idxs([]))
    return len(said) == (len(batch) if rank == 0 else 0)


def test_a_rank_without_rows_takes_part(two_ranks: Ranks, folder: Path) -> None:
    assert two_ranks.run(forward_first, str(folder)) == [True, True]
