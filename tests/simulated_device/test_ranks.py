"""Training over two ranks on the simulated device: the numbers of the same two ranks on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_accelerator import counts, module
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit" / "engines"), str(TESTS / "unit" / "trainer")]

from sharded_runs import Run, save_tiny, train  # noqa: E402
from test_expert_parallel import step  # noqa: E402
from tiny_trainer import tiny_model  # noqa: E402

from device_paths import GRPO, numbers  # noqa: E402
from device_paths import compare as compare_runs  # noqa: E402
from hybridflow.config.fsdp import FSDPConfig  # noqa: E402
from hybridflow.engines import BatchLimits  # noqa: E402
from hybridflow.models.lora import LoraSettings  # noqa: E402
from hybridflow.models.tiny import create_tiny_model  # noqa: E402
from ranks import Ranks  # noqa: E402

ROUNDING = 1e-6
"""Most of the difference of a number, relative to it where it is above 1: attention has a device's form."""
ALL = (tuple(range(7)),)
WHOLE_ROWS = {"sizes": {"sequence": 2}, "deal": ALL}

CASES: dict[str, dict[str, Any]] = {
    "full shard": {"model": {"probe": True}},
    "untied, prefetch": {"folder": "untied", "fsdp": FSDPConfig(forward_prefetch=True)},
    "two copies": {"sizes": {"fsdp_size": 1}},
    "kept gathered": {"fsdp": FSDPConfig(reshard_after_forward=False)},
    "value model": {"kind": "value"},
    "all on the CPU": {"fsdp": FSDPConfig(offload_policy=True)},
    "at rest between phases": {"fsdp": FSDPConfig(param_offload=True, optimizer_offload=True)},
    "recomputed, activations offloaded": {
        "model": {"gradient_checkpointing": True},
        "activation_offload": True,
    },
    "no rows on a rank": {"deal": ((0, 1, 3), ())},
    "adapters": {"folder": "untied", "lora": LoraSettings(rank=4)},
    "tensor parallel": {"folder": "untied", "sizes": {"tensor": 2}, "deal": ALL},
    "pipeline": {"folder": "untied", "sizes": {"pipeline": 2}, "deal": ALL},
    "pipeline, two parts a stage": {
        "folder": "tied4",
        "sizes": {"pipeline": 2},
        "deal": ALL,
        "fsdp": FSDPConfig(virtual_pipeline_parallel_size=2),
    },
    "ulysses": WHOLE_ROWS,
    "ring": {**WHOLE_ROWS, "fsdp": FSDPConfig(context_parallel="ring")},
    "one row a forward": {"limits": BatchLimits(1000, max_rows=1), "deal": ((0,), (1, 2, 3, 4, 5, 6))},
}


@pytest.fixture(scope="module")
def sim_ranks() -> Iterator[Ranks]:
    found = Ranks(2, "sim")
    yield found
    found.stop()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders by (tied, layers)."""
    return {
        name: save_tiny(tmp_path_factory.mktemp(name), tied=name.startswith("tied"), layers=layers)
        for name, layers in {"tied": 2, "untied": 2, "tied4": 4}.items()
    }


def on_the_host(rank: int, function: Callable[..., Any], run: Run, *args: Any) -> Any:
    """Return what a function finds, its tensors on the host; a fault of the device fails the call."""
    from simulated_accelerator import timeline

    timeline.wait_for_all()
    counts.forget()
    found = function(rank, run, 2, *args)
    timeline.wait_for_all()
    assert not counts.faults, "\n".join(counts.faults)
    return tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, found)


def both(two_ranks: Ranks, sim_ranks: Ranks, function: Callable[..., Any], run: Run, *args: Any) -> Any:
    """Run a function on two ranks of the CPU and on two of the device."""
    moved = replace(run, model={**run.model, "device": torch.device("sim", 0)})
    return two_ranks.run(function, run, 2, *args), sim_ranks.run(on_the_host, function, moved, *args)


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


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_cpus_numbers(
    name: str, two_ranks: Ranks, sim_ranks: Ranks, folders: dict[str, str]
) -> None:
    settings = dict(CASES[name])
    run = Run(folders[settings.pop("folder", "tied")], **settings)
    compare(*both(two_ranks, sim_ranks, train, run))


@pytest.mark.parametrize("sizes", [{"experts": 2}, {"tensor": 2, "experts": 2}])
def test_ranks_that_share_experts(
    sizes: dict[str, int], two_ranks: Ranks, sim_ranks: Ranks, tmp_path: Path
) -> None:
    shape = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    folder = create_tiny_model(tmp_path / "experts", experts=4, **shape)
    deal = ALL if "tensor" in sizes else ((0, 2, 4, 6), (1, 3, 5))
    run = Run(str(folder), grad_clip=None, steps=1, sizes=sizes, deal=deal)
    compare(*both(two_ranks, sim_ranks, step, run, None))


@pytest.mark.slow
def test_a_run_of_two_processes_under_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_DEVICES", "2")
    monkeypatch.setattr(module, "DEVICES", 2)
    model = tiny_model(tmp_path / "model")
    keys = (*GRPO, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")
    runs = [numbers(tmp_path, device, model, *keys) for device in ("cpu", "sim")]
    compare_runs(*runs, 2e-5)
