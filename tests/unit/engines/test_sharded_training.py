"""Two ranks train as one does, whatever is sharded, offloaded or recomputed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sharded_runs import Run, save_tiny, train

from hybridflow.config.model import FSDPConfig
from hybridflow.engines import BatchLimits
from hybridflow.models.adapters.lora import LoraSettings
from ranks import Ranks

ALL = tuple(range(7))
CLOSE = 2e-6
"""Float32 on both sides; what is left is the order of sums."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: save_tiny(tmp_path_factory.mktemp(name), tied=name == "tied") for name in ("tied", "untied")
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> Any:
    """The same run on one rank, once for each."""
    known: dict[str, dict[str, Any]] = {}

    def find(run: Run) -> dict[str, Any]:
        single = replace(run, fsdp=FSDPConfig(), sizes={}, activation_offload=False)
        return (
            known.setdefault(repr(single), train(0, single, 1))
            if repr(single) not in known
            else known[repr(single)]
        )

    return find


def compare(ranks: list[dict[str, Any]], one: dict[str, Any], bound: float = CLOSE) -> None:
    for step, expected in enumerate(one["losses"]):
        found = (
            ranks[0]["losses"][step]
            if ranks[0]["rows"] == ranks[1]["rows"]
            else sum(rank["losses"][step] for rank in ranks)
        )
        assert abs(found - expected) < bound
        assert ranks[0]["metrics"][step]["actor/grad_norm"] == pytest.approx(
            one["metrics"][step]["actor/grad_norm"], rel=10 * bound
        )
        assert ranks[0]["metrics"][step]["actor/num_updates"] == 1.0
        assert not {"actor/num_updates", "actor/grad_norm", "actor/lr"} & set(ranks[1]["metrics"][step]), (
            "said once, not by rank"
        )
    for rank in ranks:
        assert rank["weights"].keys() == one["weights"].keys() and rank["state"].keys() == one["state"].keys()
        for name, tensor in one["weights"].items():
            assert (rank["weights"][name] - tensor).abs().max() < bound, name
        for name, entry in one["state"].items():
            assert rank["state"][name].keys() == entry.keys()
            for key, value in entry.items():
                assert rank["state"][name][key].dtype == value.dtype, (name, key)
                assert (rank["state"][name][key] - value).abs().max() < bound, (name, key)
        for key, values in one["before"].items():
            rows = [sorted(one["rows"]).index(row) for row in rank["rows"]]
            assert rank["before"][key].shape == (len(rows), values.shape[1])
            assert len(rows) == 0 or (rank["before"][key] - values[rows]).abs().max() < bound


CASES: dict[str, dict[str, Any]] = {
    "full shard": {"model": {"probe": True}},
    "one forward each": {"limits": BatchLimits(1000)},
    "untied": {"folder": "untied"},
    "value model": {"kind": "value", "folder": "untied"},
    "reward model": {"kind": "score", "folder": "untied"},
    "process reward model, tokens of a row on two ranks": {
        "kind": "token_score",
        "sizes": {"sequence": 2},
        "deal": (ALL,),
    },
    "two copies": {"sizes": {"fsdp_size": 1}},
    "kept gathered": {"fsdp": FSDPConfig(reshard_after_forward=False)},
    "kept gathered, value model": {"fsdp": FSDPConfig(reshard_after_forward=False), "kind": "value"},
    "two copies, kept gathered": {"fsdp": FSDPConfig(reshard_after_forward=False), "sizes": {"fsdp_size": 1}},
    "prefetch": {"fsdp": FSDPConfig(forward_prefetch=True), "folder": "untied"},
    "all on the CPU": {"fsdp": FSDPConfig(offload_policy=True)},
    "at rest between phases": {"fsdp": FSDPConfig(param_offload=True, optimizer_offload=True)},
    "recomputed": {"model": {"gradient_checkpointing": True}},
    "recomputed, activations offloaded": {
        "model": {"gradient_checkpointing": True},
        "activation_offload": True,
    },
    "activations offloaded": {"activation_offload": True, "folder": "untied"},
    "three rows": {"deal": ((0, 1), (2,))},
    "no rows on a rank": {"deal": ((0, 1, 3), ())},
    "one row a forward": {"limits": BatchLimits(1000, max_rows=1), "deal": ((0,), (1, 2, 3, 4, 5, 6))},
    "tokens of a row on two ranks": {
        "sizes": {"sequence": 2},
        "deal": (ALL,),
        "model": {"gradient_checkpointing": True},
    },
    "whole groups": {"limits": BatchLimits(45, keep_groups=True), "deal": ((0, 1), (2, 3, 4, 5, 6))},
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one(name: str, two_ranks: Ranks, folders: dict[str, str], alone: Any) -> None:
    settings = dict(CASES[name])
    run = Run(folders[settings.pop("folder", "tied")], **settings)
    ranks = two_ranks.run(train, run)
    compare(ranks, alone(run))
    held = [sum(math.prod(shape) for shape in rank["shapes"].values()) for rank in ranks]
    assert sum(held) == (2 if "fsdp_size" in run.sizes else 1) * sum(
        math.prod(shape) for shape in alone(run)["shapes"].values()
    )
    assert max(held) <= 0.51 * sum(held)


def test_a_ring_steps_as_one_rank_in_float64(two_ranks: Ranks, folders: dict[str, str], alone: Any) -> None:
    run = Run(
        folders["untied"],
        sizes={"sequence": 2},
        fsdp=FSDPConfig(context_parallel="ring"),
        deal=(ALL,),
        model={"dtype": "float64", "gradient_checkpointing": True},
    )
    compare(two_ranks.run(train, run), alone(run), bound=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ulysses", "ring"])
def test_slices_and_tokens_of_a_row_step_as_one_rank_in_float64(
    four_ranks: Ranks, folders: dict[str, str], alone: Any, how: Any
) -> None:
    run = Run(
        folders["tied"],
        sizes={"sequence": 2, "tensor": 2},
        fsdp=FSDPConfig(context_parallel=how),
        deal=(ALL,),
        model={"dtype": "float64", "gradient_checkpointing": True},
    )
    compare(four_ranks.run(train, run, 4), alone(run), bound=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kind": "value", "model": {"gradient_checkpointing": True}}])
def test_adapters_train_as_on_one_rank(
    two_ranks: Ranks, folders: dict[str, str], alone: Any, settings: dict[str, Any]
) -> None:
    run = Run(folders["untied"], lora=LoraSettings(rank=4), **settings)
    ranks = two_ranks.run(train, run)
    compare(ranks, alone(run))
    assert {name for name, trained in ranks[0]["requires_grad"].items() if trained} == set(ranks[0]["state"])


OVER_4_BITS: dict[str, dict[str, Any]] = {
    "shards": {"model": {"probe": True}},
    "value model": {"kind": "value", "model": {"gradient_checkpointing": True}},
    "reward model": {"kind": "score"},
    "two copies": {"sizes": {"fsdp_size": 1}},
    "kept gathered": {"fsdp": FSDPConfig(reshard_after_forward=False)},
    "all on the CPU": {"fsdp": FSDPConfig(offload_policy=True)},
    "at rest between phases": {"fsdp": FSDPConfig(param_offload=True, optimizer_offload=True)},
    "recomputed, activations offloaded": {
        "model": {"gradient_checkpointing": True},
        "activation_offload": True,
    },
    "tokens of a row on two ranks": {"sizes": {"sequence": 2}, "deal": (ALL,)},
    "a row in a ring": {
        "sizes": {"sequence": 2},
        "deal": (ALL,),
        "fsdp": FSDPConfig(context_parallel="ring"),
    },
}


@pytest.mark.parametrize(
    "name",
    [
        each if each in ("shards", "at rest between phases") else pytest.param(each, marks=pytest.mark.slow)
        for each in OVER_4_BITS
    ],
)
def test_adapters_over_a_base_in_4_bits_train_as_on_one_rank(
    name: str, two_ranks: Ranks, folders: dict[str, str], alone: Any
) -> None:
    run = Run(folders["untied"], lora=LoraSettings(rank=4, quantization="nf4"), **OVER_4_BITS[name])
    ranks = two_ranks.run(train, run)
    compare(ranks, alone(run), 1e-5 if run.fsdp.context_parallel == "ring" else CLOSE)
    assert not any("self_attn.q_proj.base_layer.weight" in weight for weight in ranks[0]["shapes"])


def test_split_layers_train_as_whole_ones(two_ranks: Ranks, folders: dict[str, str], alone: Any) -> None:
    """Tensor parallel: matrix products are cut, so their sums are rounded otherwise."""
    for kind in ("policy", "value"):
        run = Run(folders["untied"], kind=kind, sizes={"tensor": 2}, deal=(ALL,))
        compare(two_ranks.run(train, run), alone(run), 1e-5)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_bfloat16_stays_close(kind: str, two_ranks: Ranks, folders: dict[str, str], alone: Any) -> None:
    run = Run(folders["tied"], kind=kind, model={"dtype": "bfloat16"}, steps=1)
    one, ranks = alone(run), two_ranks.run(train, run)
    assert sum(rank["losses"][0] for rank in ranks) == pytest.approx(one["losses"][0], abs=2e-3)
    assert ranks[0]["metrics"][0]["actor/grad_norm"] == pytest.approx(
        one["metrics"][0]["actor/grad_norm"], rel=0.02
    )
    for name, tensor in one["weights"].items():
        assert ranks[0]["weights"][name].dtype == tensor.dtype, (
            "a state has the same dtypes on any number of ranks"
        )
        assert (ranks[0]["weights"][name].float() - tensor.float()).abs().max() < 0.03
    assert {name: set(entry) for name, entry in ranks[0]["state"].items()} == {
        name: set(entry) for name, entry in one["state"].items()
    }
    master = ranks[0]["state"]["hf.model.norm.weight" if kind == "policy" else "backbone.norm.weight"][
        "master"
    ]
    assert master.dtype == torch.float32


def test_weights_are_those_of_the_files(two_ranks: Ranks, folders: dict[str, str], alone: Any) -> None:
    for kind in ("policy", "value"):
        run = Run(folders["untied"], kind=kind, steps=0, optim=None)
        one, ranks = alone(run), two_ranks.run(train, run)
        for rank in ranks:
            assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in one["weights"].items())
            assert not any(rank["requires_grad"].values())
