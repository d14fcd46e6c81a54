"""What one layout has saved, every other loads: the same bits, the same loss of the next step, one folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import OPTIM, Run, ask, build, dealt, save_tiny, whole
from torch import Tensor

from hybridflow.checkpoint.layout import HF_FOLDER
from hybridflow.checkpoint.sharded import load_shards
from hybridflow.distributed.shards import is_absent
from hybridflow.merger import merge
from hybridflow.models.build import build_policy
from hybridflow.workers.state import StatefulWorker
from ranks import Ranks

PARTS = ("model", "optimizer", "scheduler")
EVERYONE = (tuple(range(7)),)
SCHEDULED = replace(OPTIM, lr_scheduler_type="linear", total_training_steps=8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"deal": EVERYONE},
    "shards": {},
    "slices": {"sizes": {"tensor": 2}, "deal": EVERYONE},
    "stages": {"sizes": {"pipeline": 2}, "deal": EVERYONE},
}


def held(state: Any) -> Any:
    """Whole tensors, but for those that another stage holds."""
    if isinstance(state, dict):
        return {
            key: held(value)
            for key, value in state.items()
            if not (isinstance(value, Tensor) and is_absent(value))
        }
    return whole(state) if isinstance(state, Tensor) else state


def write(rank: int, run: Run, world_size: int, folder: str) -> None:
    """Take a step and save."""
    engine = build(run, world_size)
    rows, loss = dealt(run, engine)
    engine.train_mini_batch(rows, ask(run), loss, run.limits)
    StatefulWorker(engine).save(folder, PARTS)
    engine.export_hf(Path(folder) / HF_FOLDER, with_weights=False)


def read(rank: int, run: Run, world_size: int, folder: str, exported: str) -> tuple[Any, float, float]:
    """The state that a fresh engine has loaded; loss and gradient norm of its next step."""
    engine = build(run, world_size)
    StatefulWorker(engine).load(folder, PARTS)
    state = held(engine.state_dict())
    engine.export_hf(exported)
    rows, loss = dealt(run, engine)
    shares: list[float] = []

    def noting(answers: Any, micro: Any) -> Any:
        share, metrics = loss(answers, micro)
        shares.append(float(share.detach()))
        return share, metrics

    metrics = engine.train_mini_batch(rows, ask(run), noting, run.limits).to_floats()
    counts = engine.mesh is None or engine.mesh.returns
    return state, counts * sum(shares), metrics.get("actor/grad_norm", 0.0)


def assert_within(part: Any, all_of_it: Any, path: str = "") -> None:
    """Everything in `part` is in `all_of_it` with the same bits."""
    if isinstance(part, dict):
        for key, value in part.items():
            assert_within(value, all_of_it[key], f"{path}/{key}")
    else:
        assert torch.equal(part, all_of_it) if isinstance(part, Tensor) else part == all_of_it, path


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_reads_every_other(two_ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    model = save_tiny(tmp_path / "model", tied=tied)
    runs = {name: Run(model, optim=SCHEDULED, **changes) for name, changes in LAYOUTS.items()}
    for writer, run in runs.items():
        folder = str(tmp_path / writer)
        if writer == "one":
            write(0, run, 1, folder)
        else:
            two_ranks.run(write, run, 2, folder)
        state = load_shards(Path(folder), {part: {} for part in PARTS})
        found: dict[str, list[float]] = {}
        for reader, other in runs.items():
            exported = tmp_path / f"{writer} by {reader}"
            if reader == "one":
                results = [read(0, other, 1, folder, str(exported))]
            else:
                results = two_ranks.run(read, other, 2, folder, str(exported))
            seen = set()
            for loaded, _, _ in results:
                assert_within(loaded, state)
                seen |= loaded["model"].keys()
            assert seen == state["model"].keys()
            found[reader] = [sum(loss for _, loss, _ in results), sum(norm for _, _, norm in results)]
            again = build_policy(exported, device="cpu", probe=False).state_dict()
            assert all(torch.equal(again[name], tensor) for name, tensor in state["model"].items())
        for loss, norm in found.values():
            assert loss == pytest.approx(found["one"][0], abs=1e-6), found
            assert norm == pytest.approx(found["one"][1], rel=1e-5), found
        merged = build_policy(merge(folder, tmp_path / f"{writer} merged"), device="cpu", probe=False)
        assert_within(dict(merged.state_dict()), state["model"])
