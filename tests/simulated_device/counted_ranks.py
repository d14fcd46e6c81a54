"""Two ranks of the simulated device that share a model in some way, and how often each waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import product_phases
import torch
from simulated_accelerator import counts
from torch import Tensor
from torch.utils._pytree import tree_map

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "unit" / "engines")]  # behind this folder, which has names of theirs

from sharded_runs import Run, save_tiny  # noqa: E402

from hybridflow.config.model import FSDPConfig  # noqa: E402
from hybridflow.engines import BatchLimits  # noqa: E402
from hybridflow.models.adapters.lora import LoraSettings  # noqa: E402
from hybridflow.models.tiny import create_tiny_model  # noqa: E402

ALL = (tuple(range(7)),)
NF4 = LoraSettings(rank=4, quantization="nf4")
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
    "a base in 4 bits": {"folder": "untied", "lora": NF4},
    "a base in 4 bits, all on the CPU": {
        "folder": "untied",
        "lora": NF4,
        "fsdp": FSDPConfig(offload_policy=True),
    },
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
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"folder": "experts", "sizes": {"experts": 2}, "grad_clip": None, "steps": 1},
    "experts, tensor parallel": {
        "folder": "experts",
        "sizes": {"tensor": 2, "experts": 2},
        "deal": ALL,
        "grad_clip": None,
        "steps": 1,
    },
}
PHASES = ("update", "log-prob pass")


class Waits(NamedTuple):
    """Waits of the host in a phase, for each time it was entered."""

    ours: float
    torchs: float
    """Those of threads that no line of ours has started."""


def save_models(folder: Path) -> dict[str, str]:
    """Write the models of all cases; return their folders by name."""
    found = {
        name: save_tiny(folder / name, tied=name.startswith("tied"), layers=layers)
        for name, layers in {"tied": 2, "untied": 2, "tied4": 4}.items()
    }
    shape = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    found["experts"] = str(create_tiny_model(folder / "experts", experts=4, **shape))
    return found


def run_of(name: str, folders: dict[str, str]) -> Run:
    """Return the training of a case, on the CPU."""
    settings = dict((CASES | EXPERTS)[name])
    return Run(folders[settings.pop("folder", "tied")], **settings)


def on_sim(run: Run) -> Run:
    """Return the same training on the device."""
    return replace(run, model={**run.model, "device": torch.device("sim", 0)})


def counted(rank: int, function: Callable[..., Any], run: Run, *args: Any) -> tuple[Any, dict[str, Waits]]:
    """Return what a function finds, its tensors on the host, and its waits by phase.

    A fault of the device fails the call.
    """
    from simulated_accelerator import timeline

    product_phases.install()
    timeline.wait_for_all()
    counts.forget()
    found = function(rank, run, 2, *args)
    timeline.wait_for_all()
    assert not counts.faults, "\n".join(counts.faults)
    waits = {name: _waits(counts.phases[name]) for name in PHASES}
    return tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, found), waits


def _waits(phase: counts.Counts) -> Waits:
    ours = sum(number for (_, where), number in phase.waits.items() if not where.startswith("no line"))
    return Waits(ours / phase.entered, (phase.num_waits - ours) / phase.entered)
