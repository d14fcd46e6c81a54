"""Training with dropout of adapters: the same weights however rows are cut, shared, recomputed or spread, and
after a resume.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import training_rows
from sharded_runs import Run, build, go, loss_of, save_tiny, spec, train, weights_of

from hybridflow.checkpoint.sharded import load_shards, save_shards
from hybridflow.config.model import FSDPConfig
from hybridflow.engines import BatchLimits
from hybridflow.models.adapters.lora import LoraSettings
from ranks import Ranks

ALL = tuple(range(7))
LORA = LoraSettings(rank=4, seed=2, dropout=0.4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(
        save_tiny(tmp_path_factory.mktemp("untied"), tied=False),
        lora=LORA,
        model={"dtype": "float64"},
        dtype=torch.float64,
        limits=BatchLimits(1000),
        steps=3,
    )


@pytest.fixture(scope="module")
def alone(run: Run) -> dict[str, Any]:
    return train(0, run, 1)


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["weights"].keys() <= wanted["weights"].keys() and found["weights"]
    for name, value in found["weights"].items():
        assert float((value - wanted["weights"][name]).abs().max()) < 1e-10, name


CUTS: dict[str, dict[str, Any]] = {
    "a pass for each row": {"limits": BatchLimits(1000, max_rows=1)},
    "few tokens in a pass": {"limits": BatchLimits(24)},
    "recomputed": {"model": {"dtype": "float64", "gradient_checkpointing": True}, "limits": BatchLimits(24)},
    "activations offloaded": {"activation_offload": True, "limits": BatchLimits(24)},
    "prompts computed once": {"limits": BatchLimits(1000, share_prompts=True)},
}


@pytest.mark.parametrize("name", CUTS)
def test_one_rank_trains_the_same_however_rows_are_cut(name: str, run: Run, alone: dict[str, Any]) -> None:
    compare(train(0, replace(run, **CUTS[name]), 1), alone)


def test_dropout_changes_updates_and_nothing_else(run: Run, alone: dict[str, Any]) -> None:
    without = train(0, replace(run, lora=replace(LORA, dropout=0.0)), 1)
    assert all(alone["before"][name].equal(without["before"][name]) for name in without["before"])
    assert any(not alone["weights"][name].equal(value) for name, value in without["weights"].items())
    engine = build(replace(run, lora=replace(LORA, dropout=0.0)), 1)
    dropping = build(run, 1)
    go(dropping, 0, run, 1)
    engine.load_state_dict({"model": dropping.state_dict()["model"]})
    rows = training_rows(dtype=torch.float64)
    plain = engine.forward(rows, spec(run), run.limits)
    assert plain["log_probs"].equal(dropping.forward(rows, spec(run), run.limits)["log_probs"])


SPREADS: dict[str, dict[str, Any]] = {
    "shards": {"limits": BatchLimits(24)},
    "two copies, recomputed": {
        "sizes": {"fsdp_size": 1},
        "model": {"dtype": "float64", "gradient_checkpointing": True},
    },
    "tokens of a row on two ranks": {"sizes": {"sequence": 2}, "deal": (ALL,)},
    "tokens in a ring, recomputed": {
        "sizes": {"sequence": 2},
        "fsdp": FSDPConfig(context_parallel="ring"),
        "deal": (ALL,),
        "model": {"dtype": "float64", "gradient_checkpointing": True},
    },
    "stages, recomputed": {
        "sizes": {"pipeline": 2},
        "deal": (ALL,),
        "limits": BatchLimits(24),
        "model": {"dtype": "float64", "gradient_checkpointing": True},
    },
}


@pytest.mark.parametrize("name", SPREADS)
def test_two_ranks_train_as_one(name: str, two_ranks: Ranks, run: Run, alone: dict[str, Any]) -> None:
    names: set[str] = set()
    for found in two_ranks.run(train, replace(run, **SPREADS[name])):
        compare(found, alone)
        names |= found["weights"].keys()
    assert names == alone["weights"].keys()


def test_a_resumed_run_has_the_same_bits(run: Run, alone: dict[str, Any], tmp_path: Path) -> None:
    first = build(run, 1)
    go(first, 0, replace(run, steps=1), 1)
    save_shards(tmp_path, first.state_dict())
    second = build(run, 1)
    second.load_state_dict(load_shards(tmp_path, second.state_dict()))
    rows = training_rows(dtype=torch.float64)
    for _ in range(2):
        second.train_mini_batch(rows, spec(run), loss_of(run, rows), run.limits)
    assert all(value.equal(alone["weights"][name]) for name, value in weights_of(second).items())
    other = build(replace(run, lora=replace(LORA, seed=3)), 1)
    other.load_state_dict(load_shards(tmp_path, other.state_dict()))
    other.train_mini_batch(rows, spec(run), loss_of(run, rows), run.limits)
    third = build(run, 1)
    third.load_state_dict(load_shards(tmp_path, third.state_dict()))
    third.train_mini_batch(rows, spec(run), loss_of(run, rows), run.limits)
    assert any(not value.equal(weights_of(other)[name]) for name, value in weights_of(third).items())
