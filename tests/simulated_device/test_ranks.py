"""Training over two ranks on the simulated device: the numbers of two ranks on the CPU, and few waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_ranks import CASES, TESTS, counted, on_sim, run_of, save_models
from sharded_runs import Run, train
from simulated_accelerator import module
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

sys.path += [str(TESTS), str(TESTS / "unit" / "trainer")]

from test_expert_parallel import step
from tiny_trainer import tiny_model

from device_paths import GRPO, numbers
from device_paths import compare as compare_runs
from hybridflow.distributed.accelerators import features
from ranks import Ranks

PINS = features("sim").pins_memory
QUICK = (
    "full shard",
    "all on the CPU",
    "a base in 4 bits, all on the CPU",
    "at rest between phases",
    "no rows on a rank",
    "tensor parallel",
    "pipeline",
    "ulysses",
    "ring",
)
"""Cases that are not slow tests: one of each layout, and of each place where weights rest."""
ROUNDING = 1e-6
"""Most of the difference of a number, relative to it where it is above 1: attention has a device's form."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


def both(two_ranks: Ranks, ranks: Ranks, function: Callable[..., Any], run: Run, *args: Any) -> Any:
    """Run a function on two ranks of the CPU and of the device; return what both find, and waits."""
    on_the_cpu = two_ranks.run(function, run, 2, *args)
    found = ranks.run(counted, function, on_sim(run), *args)
    return on_the_cpu, [result for result, _ in found], [waits for _, waits in found]


def compare(cpu: list[Any], sim: list[Any], tolerance: float = ROUNDING) -> None:
    """Hold what the ranks found together, place by place."""
    wanted, shape = tree_flatten_with_path(cpu)
    got, other = tree_flatten_with_path(sim)
    assert shape == other and wanted
    apart = []
    for (path, left), (_, right) in zip(wanted, got, strict=True):
        if not isinstance(left, (float, Tensor)):
            assert left == right, path
            continue
        left, right = torch.as_tensor(left), torch.as_tensor(right)
        assert left.shape == right.shape and left.dtype == right.dtype, path
        if left.numel():
            difference = ((left - right).abs() / left.abs().clamp_min(1)).nan_to_num(9.0).max().item()
            # the second step's has the first one's rounding, by AdamW's first step of full size
            if difference > tolerance * (10 if "grad_norm" in str(path) else 1):
                apart.append(f"{path}: {difference:.2g}")
    assert not apart, "\n".join(apart)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_two_ranks_have_the_cpus_numbers(
    name: str, two_ranks: Ranks, ranks: Ranks, folders: dict[str, str]
) -> None:
    cpu, sim, waits = both(two_ranks, ranks, train, run_of(name, folders))
    compare(cpu, sim)
    if PINS and "4 bits" not in name:  # whose first pass makes the table of levels, once in a process
        most = {"update": 1, "log-prob pass": 1}
        if name == "at rest between phases":
            most = {"update": 2, "log-prob pass": 2}  # until all has been sent
        for rank in waits:
            assert {phase: figures.ours for phase, figures in rank.items()} == most, rank
            assert name == "all on the CPU" or all(figures.torchs == 0 for figures in rank.values()), rank


@pytest.mark.parametrize(("name", "most"), [("experts", 5), ("experts, tensor parallel", 7)])
def test_ranks_that_share_experts_wait_once_a_layer(
    name: str, most: int, two_ranks: Ranks, ranks: Ranks, folders: dict[str, str]
) -> None:
    """They must know how many tokens come: in two layers of two micro-batches, or of three."""
    cpu, sim, waits = both(two_ranks, ranks, step, run_of(name, folders), None)
    compare(cpu, sim)
    if PINS:
        for rank in waits:
            assert rank["update"].ours == rank["log-prob pass"].ours == most, rank


@pytest.mark.slow
def test_a_run_of_two_processes_under_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_DEVICES", "2")
    monkeypatch.setattr(module, "DEVICES", 2)
    model = tiny_model(tmp_path / "model")
    keys = (*GRPO, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")
    runs = [numbers(tmp_path, device, model, *keys) for device in ("cpu", "sim")]
    compare_runs(*runs, 2e-5)
