"""What one layout has saved every other loads: the same bits, next step, folder and generation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import OPTIM, Run, build, dealt, save_tiny, spec, whole
from torch import Tensor

from hybridflow.checkpoint.layout import HF_FOLDER
from hybridflow.checkpoint.sharded import load_shards
from hybridflow.distributed.shards import is_absent
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.merger import merge
from hybridflow.models.copies.twin import Twin
from hybridflow.models.files.build import build_policy
from hybridflow.models.tiny import create_tiny_model
from hybridflow.weight_sync.reshard import GatheredTwin
from hybridflow.workers.state import StatefulWorker
from ranks import Ranks

PARTS = ("model", "optimizer", "scheduler")
EVERYONE = (tuple(range(7)),)
QUARTERS = ((0, 4), (1, 5), (2, 6), (3,))
SCHEDULED = replace(OPTIM, lr_scheduler_type="linear", total_training_steps=8)
Layouts = dict[str, tuple[int, dict[str, Any]]]
"""(processes, changes to a `Run`) by name."""
COMMON: Layouts = {
    "one": (1, {"deal": EVERYONE}),
    "shards": (2, {}),
    "stages": (2, {"sizes": {"pipeline": 2}, "deal": EVERYONE}),
}
LAYOUTS: dict[str, Layouts] = {
    "dense": {**COMMON, "slices": (2, {"sizes": {"tensor": 2}, "deal": EVERYONE})},
    "experts": {
        **COMMON,
        "experts": (2, {"sizes": {"experts": 2}}),
        "slices and experts": (2, {"sizes": {"tensor": 2, "experts": 2}, "deal": EVERYONE}),
        "experts in shards": (4, {"sizes": {"experts": 2}, "deal": QUARTERS}),
        "stages of experts": (4, {"sizes": {"pipeline": 2, "experts": 2}}),
    },
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
    engine.train_mini_batch(rows, spec(run), loss, run.limits)
    StatefulWorker(engine).save(folder, PARTS)
    engine.export_hf(Path(folder) / HF_FOLDER, with_weights=False)


def read(rank: int, run: Run, world_size: int, folder: str, exported: str) -> tuple[Any, float, float]:
    """The state that a fresh engine has loaded; loss and gradient norm of its next step."""
    engine = build(run, world_size)
    StatefulWorker(engine).load(folder, PARTS)
    state = held(engine.state_dict())
    engine.export_hf(exported)
    if engine.mesh is not None:
        state["generation"] = generation(engine, run)
    rows, loss = dealt(run, engine)
    shares: list[float] = []

    def noting(answers: Any, micro: Any) -> Any:
        share, metrics = loss(answers, micro)
        shares.append(float(share.detach()))
        return share, metrics

    metrics = engine.train_mini_batch(rows, spec(run), noting, run.limits).to_floats()
    counts = engine.mesh is None or engine.mesh.returns
    return state, counts * sum(shares), metrics.get("actor/grad_norm", 0.0)


def generation(engine: FSDPEngine, run: Run) -> dict[str, Tensor]:
    """The weights of the module that generates on this rank."""
    dtypes = {weight.name: weight.compute_dtype for weight in engine.held_weights()}
    twin = Twin(engine.policy, dtypes=dtypes, device=torch.device("cpu"), lora=run.lora)
    GatheredTwin(engine.held_weights, twin).acquire(0)
    return {name: whole(tensor) for name, tensor in twin.policy.state_dict().items()}


def read_all(
    rank: int, run: Run, world_size: int, written: dict[str, str], exported: str
) -> dict[str, tuple[Any, float, float]]:
    """What each of the folders gives."""
    return {
        writer: read(rank, run, world_size, folder, f"{exported} from {writer}")
        for writer, folder in written.items()
    }


def assert_within(part: Any, all_of_it: Any, path: str = "") -> None:
    """Everything in `part` is in `all_of_it` with the same bits."""
    if isinstance(part, dict):
        for key, value in part.items():
            assert_within(value, all_of_it[key], f"{path}/{key}")
    else:
        assert torch.equal(part, all_of_it) if isinstance(part, Tensor) else part == all_of_it, path


def model_folder(folder: Path, kind: str) -> str:
    if kind == "experts":
        sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
        return str(create_tiny_model(folder, experts=4, seed=3, **sizes))
    return save_tiny(folder, tied=kind == "tied")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_every_layout_reads_every_other(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    model = model_folder(tmp_path / "model", kind)
    layouts = LAYOUTS["experts" if kind == "experts" else "dense"]
    runs = {name: Run(model, optim=SCHEDULED, **changes) for name, (_, changes) in layouts.items()}

    def on_all(name: str, function: Any, *arguments: Any) -> list[Any]:
        count = layouts[name][0]
        if count == 1:
            return [function(0, runs[name], 1, *arguments)]
        ranks = two_ranks if count == 2 else four_ranks
        return ranks.run(function, runs[name], count, *arguments)

    written = {name: str(tmp_path / name) for name in layouts}
    for writer, folder in written.items():
        on_all(writer, write, folder)
    found = {reader: on_all(reader, read_all, written, str(tmp_path / f"by {reader}")) for reader in layouts}
    for writer, folder in written.items():
        state = load_shards(Path(folder), {part: {} for part in PARTS})
        assert all(entry["exp_avg"].any() for entry in state["optimizer"].values()), "a step was taken"
        numbers = {}
        for reader, ranks in found.items():
            results = [each[writer] for each in ranks]
            assert_read(state, [loaded for loaded, _, _ in results])
            numbers[reader] = [sum(loss for _, loss, _ in results), sum(norm for _, _, norm in results)]
            again = build_policy(tmp_path / f"by {reader} from {writer}", device="cpu", probe=False)
            assert_within(state["model"], dict(again.state_dict()))
        for loss, norm in numbers.values():
            assert loss == pytest.approx(numbers["one"][0], abs=1e-6), numbers
            assert norm == pytest.approx(numbers["one"][1], rel=1e-5), numbers
        merged = build_policy(merge(folder, tmp_path / f"{writer} merged"), device="cpu", probe=False)
        assert_within(dict(merged.state_dict()), state["model"])


def assert_read(state: Any, loaded: list[Any]) -> None:
    """All ranks together have all of the state, and each that generates has all of the model."""
    for each in loaded:
        assert_within(each.pop("generation", {}), state["model"])
        assert_within(each, state)
    moments = {(name, key) for name, entry in state["optimizer"].items() for key in entry}
    assert set().union(*(each["model"] for each in loaded)) == state["model"].keys()
    assert moments == {
        (name, key) for each in loaded for name, entry in each["optimizer"].items() for key in entry
    }
