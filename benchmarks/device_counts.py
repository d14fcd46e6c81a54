"""What a run asks of an accelerator, by phase: waits of the host, launches, bytes each way, peak memory.

    make device-counts          (or with ../tests/simulated_device/plugin on PYTHONPATH)

It runs on the simulated accelerator of the tests (docs/accelerators.md), which counts and has no clock: the
figures are the same on each machine. Writes `benchmarks/results/device_counts.md`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "simulated_device"))

from counted_ranks import CASES, EXPERTS, counted, on_sim, run_of, save_models  # noqa: E402
from counted_run import STEPS, counted_run  # noqa: E402
from sharded_runs import train  # noqa: E402
from simulated_accelerator import counts  # noqa: E402
from simulated_accelerator.row import KIND  # noqa: E402

from ranks import Ranks  # noqa: E402

RESULT = Path(__file__).parent / "results" / "device_counts.md"
ACTOR = "actor_rollout_ref.actor"
RUNS: dict[str, tuple[str, ...]] = {
    "GRPO": (),
    "GRPO, steps not recorded": ("actor_rollout_ref.rollout.enforce_eager=true",),
    "GRPO, top_p=0.9": ("actor_rollout_ref.rollout.top_p=0.9",),
    "GRPO with a reference": (f"{ACTOR}.use_kl_loss=true",),
    "GRPO, LoRA": ("actor_rollout_ref.model.lora_rank=4",),
    "GRPO, shared prompts": (f"{ACTOR}.use_prefix_grouper=true",),
    "GRPO, all offloaded": (
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.model.enable_activation_offload=true",
    ),
    "PPO with a critic": ("algorithm.adv_estimator=gae",),
}
PHASES = (
    "training step",
    "prefill",
    "quiet decode step",
    "rows end",
    "log-prob pass",
    "update",
    "optimizer",
)
PAGE = """# What a run asks of its accelerator

{date} · `make device-counts` · simulated accelerator of the kind `{kind}`

Written by benchmarks/device_counts.py; do not edit. Figures of the tiny recipe (8 prompts of 8 responses a
step, two updates, a model of 2 layers in float32) on the simulated accelerator, for each time a phase was
entered in steps 2 and 3. A wait is where the host stops until the device has done what it was given; launches
are operators (a recorded step is one). They do not depend on the machine. What they do not say: seconds,
the kernels' own numerics, NCCL.

{tables}
"""


def table(name: str) -> str:
    """Return the figures of the run that was counted last, by phase, and where it waited."""
    lines = [
        f"## {name}",
        "",
        "| phase | entered | waits | launches | bytes to the device | bytes to the host | peak bytes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for phase in PHASES:
        found = counts.phases.get(phase)
        if found is None or not found.entered:
            continue
        number = found.entered
        cells = [number, found.num_waits / number, found.num_launches / number]
        whole = f"| {phase} | {cells[0]} | {cells[1]:.4g} | {cells[2]:.4g} |"
        if phase == "quiet decode step":
            lines.append(whole + " | | |")
        else:
            sent = f" {found.to_device / number:,.0f} | {found.to_host / number:,.0f} | {found.peak:,} |"
            lines.append(whole + sent)
    steps = STEPS - 1
    lines += ["", "| waits a step | reason | place |", "|---:|---|---|"]
    for (reason, where), number in counts.phases["training step"].waits.most_common():
        place = where.split(" < ")[0]
        lines.append(f"| {number / steps:.4g} | {reason} | `{place}` |")
    return "\n".join(lines)


def layouts() -> str:
    """Return the waits of two ranks that share a model, by how they share it."""
    lines = [
        "## Two ranks",
        "",
        "Waits of the first rank for each update and each pass for log-probs, of two or three micro-batches.",
        "The model has 2 layers. Ranks that share experts wait once a layer for each micro-batch, to know",
        "how many tokens come.",
        "",
        "| ranks | update | log-prob pass |",
        "|---|---:|---:|",
    ]
    ranks = Ranks(2, "sim")
    with tempfile.TemporaryDirectory(prefix="counted-") as folder:
        folders = save_models(Path(folder))
        for name in CASES | EXPERTS:
            (_, waits), _ = ranks.run(counted, train, on_sim(run_of(name, folders)))
            cells = []
            for phase in ("update", "log-prob pass"):
                torchs = f" and {waits[phase].torchs:g} of FSDP" if waits[phase].torchs else ""
                cells.append(f"{waits[phase].ours:g}{torchs}")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    ranks.stop()
    return "\n".join(lines)


def main() -> None:
    """Count the runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of runs, separated by semicolons; nothing is written")
    asked = parser.parse_args().only
    tables = []
    for name, keys in RUNS.items():
        if asked and name not in asked.split(";"):
            continue
        counts.forget()
        counted_run(*keys)
        tables.append(table(name))
        print(tables[-1], flush=True)
    if not asked or asked == "Two ranks":
        tables.append(layouts())
        print(tables[-1], flush=True)
    if not asked:
        date = datetime.date.today().isoformat()
        RESULT.write_text(PAGE.format(date=date, kind=KIND, tables="\n\n".join(tables)), encoding="utf-8")


if __name__ == "__main__":
    main()
