"""The state of a sharded engine, the guard of all ranks, and what they agree on beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import folders
from sharded_runs import EVEN, Run, build, dealt, save_tiny, spec, train, weights_of, whole
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.config.model import FSDPConfig, MixedPrecisionConfig, OptimConfig
from hybridflow.engines import BatchLimits, Held, OutputSpec
from hybridflow.engines.micro_batches import split_further
from hybridflow.errors import CheckpointError, HybridFlowError, TrainingError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from ranks import Ranks

SCHEDULED = OptimConfig(lr=1e-2, eps=1e-5, lr_scheduler_type="linear", total_training_steps=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tied"), tied=True)


def step(engine: Any, run: Run) -> dict[str, float]:
    batch, loss = dealt(run, engine)
    return engine.train_mini_batch(batch, spec(run), loss, run.limits).to_floats()


def copied(state: Any) -> Any:
    """Tensors of a state as they are now: DTensors stay so."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else state


def gathered(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    return whole(state) if isinstance(state, Tensor) else state


def go_on(rank: int, run: Run, way: str) -> tuple[bool, list[str]]:
    """Two steps, a state, two more; a second engine takes the state and goes the same two steps."""
    first, second = build(run, 2), build(run, 2)
    step(first, run)
    step(first, run)
    step(second, run)
    state = first.state_dict()
    kinds = sorted(
        {type(value).__name__ for entry in state["optimizer"].values() for value in entry.values()}
    )
    second.load_state_dict(copied(state) if way == "shards" else gathered(state))
    for _ in range(2):
        step(first, run)
        step(second, run)
    ours, theirs = gathered(first.state_dict()), gathered(second.state_dict())
    same = all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"]) and all(
        torch.equal(value, theirs["optimizer"][name][key])
        for name, entry in ours["optimizer"].items()
        for key, value in entry.items()
    )
    return same and ours["scheduler"] == theirs["scheduler"] == {
        "num_steps": 4,
        "nonfinite_in_a_row": 0,
    }, kinds


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("shards", {}),
        ("whole tensors", {}),
        ("shards", {"model": {"dtype": "bfloat16"}}),
        ("whole tensors", {"model": {"dtype": "bfloat16"}, "sizes": {"fsdp_size": 1}}),
        ("shards", {"fsdp": FSDPConfig(offload_policy=True)}),
        ("shards", {"fsdp": FSDPConfig(param_offload=True, optimizer_offload=True), "kind": "value"}),
    ],
)
def test_a_loaded_state_goes_on_to_the_bit(
    two_ranks: Ranks, folder: str, way: str, changes: dict[str, Any]
) -> None:
    run = Run(folder, optim=SCHEDULED, **changes)
    assert two_ranks.run(go_on, run, way) == [(True, ["DTensor", "Tensor"])] * 2


def refuse(rank: int, run: Run) -> list[str]:
    engine = build(run, 2)
    state, said = engine.state_dict(), []
    name = "hf.model.norm.weight"
    for model in ({**state["model"], "odd": torch.zeros(1)}, {**state["model"], name: torch.zeros(2)}):
        try:
            engine.load_state_dict({"model": model})
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_states_that_do_not_fit_are_refused(two_ranks: Ranks, folder: str) -> None:
    for said in two_ranks.run(refuse, Run(folder)):
        assert "'odd'" in said[0]
        assert "hf.model.norm.weight is (2,) in the checkpoint and (32,) here" in said[1]


def poison(rank: int, run: Run, dump: str, bad_rank: int) -> dict[str, Any]:
    engine = build(run, 2)
    engine.guard.folder = Path(dump)
    before = weights_of(engine)
    batch, loss = dealt(run, engine)

    def broken(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        share, metrics = loss(outputs, micro)
        return share * (float("nan") if rank == bad_rank else 1.0), metrics

    metrics = engine.train_mini_batch(batch, spec(run), broken, run.limits).to_floats()
    after = weights_of(engine)
    error = ""
    try:
        for _ in range(2):
            engine.train_mini_batch(batch, spec(run), broken, run.limits)
    except TrainingError as caught:
        error = str(caught)
    return {
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "metrics": metrics,
        "error": error,
    }


@pytest.mark.parametrize("sizes", [{}, {"sequence": 2}])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(
    two_ranks: Ranks, folder: str, tmp_path: Path, sizes: dict[str, int]
) -> None:
    run = Run(folder, sizes=sizes, deal=(tuple(range(7)),) if sizes else EVEN)
    first, second = two_ranks.run(poison, run, str(tmp_path / "rows"), 0 if sizes else 1)
    assert first["same"]
    assert second["same"]
    assert "3 in a row" in first["error"]
    assert "3 in a row" in second["error"]
    assert first["metrics"]["actor/num_skipped_steps"] == 1.0
    assert "actor/num_skipped_steps" not in second["metrics"]
    names = [path.name for path in folders(tmp_path / "rows")]
    assert [name for name in names if "_1_" in name] == [
        f"actor_after_update_0_1_rank{rank}" for rank in ((0,) if sizes else (0, 1))
    ]
    assert len(DataProto.load_from_disk(tmp_path / "rows" / names[0])) == len(run.deal[0])


def over_the_cap(rank: int, run: Run) -> str:
    engine = build(run, 2)
    batch, _ = dealt(run, engine)
    try:
        engine.forward(batch, OutputSpec(log_probs=True), BatchLimits(12))
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_rows_over_the_cap_of_one_rank_stop_all(two_ranks: Ranks, folder: str) -> None:
    first, second = two_ranks.run(over_the_cap, Run(folder, deal=((0, 2), (3, 4))))
    assert first.startswith("TrainingError: the rows of another rank")
    assert second.startswith("ConfigError: row 0 has 14 tokens but a micro-batch may hold 12")


def test_heavy_micro_batches_are_split_to_the_common_number() -> None:
    lengths, bins = [5, 4, 3, 9, 1], [[0, 1, 2], [3, 4]]
    assert split_further(bins, lengths, None, 2) == bins
    assert split_further(bins, lengths, None, 3) == [[0], [1, 2], [3, 4]]
    assert split_further(bins, lengths, None, 9) == [[0], [1], [2], [3], [4]]
    assert split_further(bins, lengths, [0, 0, 1, 2, 2], 9) == [[0, 1], [2], [3, 4]], "groups stay whole"


def idle(rank: int, run: Run) -> list[str]:
    """What is gathered must not stay so between calls: everybody who looks sees shards."""
    engine = build(run, 2)
    batch, loss = dealt(run, engine)
    engine.forward(batch, spec(run), run.limits)
    found = [
        name for name, parameter in engine.module.named_parameters() if not isinstance(parameter, DTensor)
    ]
    engine.train_mini_batch(batch, spec(run), loss, run.limits)
    return found + [
        name for name, parameter in engine.module.named_parameters() if not isinstance(parameter, DTensor)
    ]


@pytest.mark.parametrize("reshard", [True, False])
def test_nothing_stays_gathered_between_calls(two_ranks: Ranks, folder: str, reshard: bool) -> None:
    assert two_ranks.run(idle, Run(folder, fsdp=FSDPConfig(reshard_after_forward=reshard))) == [[], []]


def test_no_rows_on_one_rank_give_empty_outputs(folder: str) -> None:
    run = Run(folder, deal=((),), steps=0)
    assert {name: tuple(values.shape) for name, values in train(0, run, 1)["before"].items()} == {
        "log_probs": (0, 9),
        "entropy": (0, 9),
    }


def held_parts(rank: int, run: Run) -> list[Held]:
    engine = build(run, 2)
    batch, loss = dealt(run, engine)
    engine.train_mini_batch(batch, spec(run), loss, run.limits)
    return list(engine.held_weights())


def test_held_weights_of_all_ranks_are_the_whole_model(two_ranks: Ranks, folder: str) -> None:
    fsdp = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="bfloat16"))
    first, second = two_ranks.run(held_parts, Run(folder, fsdp=fsdp))
    names = [name for name, _ in build(Run(folder), 1).module.named_parameters()]
    assert [each.name for each in first] == [each.name for each in second] == names
    for one, two in zip(first, second, strict=True):
        assert one.shape == two.shape and one.box != two.box and (one.box & two.box) is None
        assert one.box.numel + two.box.numel == torch.Size(one.shape).numel()
        for each in (one, two):
            assert tuple(each.tensor.shape) == each.box.shape
            assert (each.tensor.dtype, each.compute_dtype) == (torch.float32, torch.bfloat16)
