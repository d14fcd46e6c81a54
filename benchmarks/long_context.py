"""Rows of up to 16,384 tokens on a CPU: one process, Ulysses and a ring of two; memory beside the plan.

    python benchmarks/long_context.py   # writes benchmarks/results/long_context.md; a few minutes

A tiny model with a vocabulary of 32,768 tokens trains on one row, half prompt and half response, with
gradient checkpointing. Each setting has processes of its own; their peak is the kernel's, reset
before the step.
"""

from __future__ import annotations

import datetime
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "models")]

import torch  # noqa: E402
from long_rows import HOW, long_row, save_model  # noqa: E402
from side_by_side import machine  # noqa: E402

from hybridflow.algorithms.aggregation import LossScale  # noqa: E402
from hybridflow.config.actor_rollout_ref import ActorConfig  # noqa: E402
from hybridflow.config.model import FSDPConfig, ModelConfig, OptimConfig  # noqa: E402
from hybridflow.distributed.layout import ParallelLayout  # noqa: E402
from hybridflow.engines import BatchLimits, OutputSpec  # noqa: E402
from hybridflow.engines.build import build_engine  # noqa: E402
from hybridflow.planner.memory import RoleEngine, engine_needs  # noqa: E402
from hybridflow.planner.model_shape import load_shape  # noqa: E402
from hybridflow.workers.losses import find_policy_loss, policy_loss  # noqa: E402
from ranks import Ranks  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "long_context.md"
LENGTHS = (4096, 8192, 16384)


def settings(how: str) -> tuple[ParallelLayout, FSDPConfig]:
    """Return the layout of a setting, and its keys."""
    if how == "one process":
        return ParallelLayout(), FSDPConfig()
    ring = FSDPConfig(context_parallel="ring") if how == "ring 2" else FSDPConfig()
    return ParallelLayout.from_keys(2, sequence=2), ring


def step(rank: int, folder: str, how: str, length: int) -> dict[str, float]:
    """Train on a short row, then on a long one: MiB that the second adds at its peak, its CPU seconds."""
    layout, fsdp = settings(how)
    arguments = {"path": folder, "device": torch.device("cpu"), "dtype": "float32", "probe": False}
    engine = build_engine(
        "policy",
        {**arguments, "gradient_checkpointing": True},
        name="actor",
        optim=OptimConfig(),
        grad_clip=1.0,
        fsdp=fsdp,
        layout=layout,
    )
    config = ActorConfig()

    def train(tokens: int) -> None:
        rows = long_row(tokens)
        loss = policy_loss(config, LossScale.count(rows.batch["loss_mask"]), find_policy_loss(config))
        engine.train_mini_batch(rows, OutputSpec(log_probs=True), loss, BatchLimits(tokens))

    train(64)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    cpu = seconds()
    train(length)
    return {"peak": status("VmHWM") - before, "cpu": seconds() - cpu}


def status(name: str) -> float:
    """Return a line of this process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def seconds() -> float:
    """Return the CPU seconds that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def planned(folder: str, how: str, length: int) -> float:
    """Return the MiB of activations and logits that `config --explain` tells of such a step."""
    layout, fsdp = settings(how)
    model = ModelConfig(path=folder, enable_gradient_checkpointing=True)
    engine = RoleEngine("actor", layout, fsdp, model, True, 1, length, length)
    needs = engine_needs(engine, load_shape(folder).size(itemsize=4), device="cpu")
    sizes = {part.label: part.size for part in needs.parts}
    after = sizes.get("logits") or sizes["scores of a block of the ring"]
    return (sizes["activations of a micro-batch"] + after) / 2**20


def main() -> None:
    """Measure every setting and write the page."""
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), vocabulary=32768)
        for length in LENGTHS:
            for how in HOW:
                ranks = Ranks(1 if how == "one process" else 2)
                try:
                    found: list[dict[str, Any]] = ranks.run(step, folder, how, length)
                finally:
                    ranks.stop()
                peak = max(each["peak"] for each in found)
                told = planned(folder, how, length)
                written = length * length * 4 / 2**20
                cells = [f"{length:,}", how, f"{peak:,.0f}", f"{told:,.0f}", f"{peak / told:.2f}"]
                rows.append([*cells, f"{written:,.0f}", f"{max(each['cpu'] for each in found):.0f}"])
                print(" · ".join(rows[-1]), flush=True)
    PAGE.write_text(page(rows))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page(rows: list[list[str]]) -> str:
    """Return the whole page."""
    header = [
        *("tokens", "setting", "MiB at the peak", "planned", "measured / planned"),
        *("one head's n² scores, MiB", "CPU seconds"),
    ]
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    return (
        "# Rows of many tokens\n\n"
        f"{datetime.date.today()} · `python benchmarks/long_context.py` · {machine()}\n\n"
        "Written by benchmarks/long_context.py; do not edit. One optimizer step of a tiny model (two layers "
        "of width 64, 32,768 entries in its vocabulary, float32, gradient checkpointing) on one row, half "
        "prompt and half response. What the step adds to a process at its peak is beside what `hybridflow "
        "config --explain` plans for its activations and logits; of two processes the larger one. No setting "
        "writes the scores of a row out.\n\n" + "\n".join(table) + "\n"
    )


if __name__ == "__main__":
    main()
