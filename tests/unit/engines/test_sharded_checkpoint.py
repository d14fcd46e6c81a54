"""A trained engine saved at two ranks, resumed at one, and back: the same bits, and the same next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import Run, build, go, save_tiny, whole
from torch import Tensor

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.workers.state import StatefulWorker
from ranks import Ranks

PARTS = ("model", "optimizer", "scheduler")
SCHEDULED = OptimConfig(lr=1e-2, eps=1e-5, lr_scheduler_type="linear", total_training_steps=8)
EVERYONE = (tuple(range(7)),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tied"), tied=True)


def gathered(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    return whole(state) if isinstance(state, Tensor) else state


def visit(rank: int, run: Run, world_size: int, load: str | None, save: str | None) -> dict[str, Any]:
    """Build, load or train, save, and take a step; return the state and the step's loss on this rank."""
    engine = build(run, world_size)
    worker = StatefulWorker(engine)
    if load is None:
        go(engine, rank, run, world_size)
    else:
        worker.load(load, PARTS)
    if save is not None:
        digests = worker.save(save, PARTS)
        assert set(digests) == {path.name for path in Path(save).iterdir()}, "every rank knows all files"
    state = gathered(engine.state_dict())
    return {"state": state, **_one_more(engine, rank, run, world_size)}


def _one_more(engine: FSDPEngine, rank: int, run: Run, world_size: int) -> dict[str, Any]:
    done = go(engine, rank, run, world_size)
    return {"loss": done["losses"][0], "weights": done["weights"]}


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{path}/{key}")
    else:
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs, path


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sharded"),
        pytest.param({"model": {"dtype": "bfloat16"}}, id="bfloat16"),
        pytest.param({"sizes": {"tensor": 2}, "deal": EVERYONE}, id="tensor parallel"),
        pytest.param({"sizes": {"fsdp_size": 1}}, id="replicated", marks=pytest.mark.slow),
        pytest.param(
            {"fsdp": FSDPConfig(param_offload=True, optimizer_offload=True), "kind": "value"},
            id="offloaded value",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_from_two_to_one_and_back(
    two_ranks: Ranks, folder: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = Run(folder, optim=SCHEDULED, steps=1, **changes)
    at_two = two_ranks.run(visit, run, 2, None, str(tmp_path / "two"))
    at_one = visit(0, run, 1, str(tmp_path / "two"), str(tmp_path / "one"))
    back = two_ranks.run(visit, run, 2, str(tmp_path / "one"), None)
    for other in (at_one, *back):
        assert_same(other["state"], at_two[0]["state"])
    assert at_one["state"]["scheduler"]["num_steps"] == 1
    assert any(entry["exp_avg"].any() for entry in at_one["state"]["optimizer"].values())
    narrow = run.model.get("dtype") == "bfloat16"
    leaders = 1 if run.sizes.get("tensor") else 2
    losses = [sum(rank["loss"] for rank in ranks[:leaders]) for ranks in (at_two, [at_one], back)]
    assert losses[2] == losses[0] and abs(losses[1] - losses[0]) < (1e-2 if narrow else 1e-6)
    for name, tensor in at_two[0]["weights"].items():
        assert torch.equal(back[0]["weights"][name], tensor), name
        assert (at_one["weights"][name].float() - tensor.float()).abs().max() < (2e-2 if narrow else 2e-6), (
            name
        )
