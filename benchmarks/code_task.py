"""Does a tiny model learn to write functions that pass hidden test cases? GRPO in the sandbox from a warm
start, and a control whose training questions have the test cases of other questions.

    python benchmarks/code_task.py [--seeds 0,1,2] [--steps 40]       # writes benchmarks/results/code_task.md

tiny model ──SFT, of which four in ten answers are right──► warm start ──GRPO──► held-out questions solved
                                                                └──GRPO, cases shuffled──► the control
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import time
from pathlib import Path

from learn_settings import RESULTS, ROOT
from side_by_side import machine

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.tasks.one_liners import BEGIN, OPERATORS
from hybridflow.models.tiny import create_tiny_model, create_tiny_tool_tokenizer
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.sft.build import build as build_sft

WORK = ROOT / "code_task"
PAGE = RESULTS / "code_task.md"
METRIC = "val-core/code/acc/mean@1"
SHUFFLED = "data.task.options.shuffled=true"
GAIN = 0.3
"""Share of the held-out questions that a run has to solve more than its warm start did."""


def warm_start(seed: int) -> Path:
    """Return a model that knows the form of the answers, and each number in part."""
    folder = WORK / f"warm_{seed}"
    if (folder / "done" / "config.json").exists():
        return folder / "done"
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = create_tiny_tool_tokenizer((BEGIN, *OPERATORS))
    keys = [
        f"model.path='{create_tiny_model(folder / 'model', tokenizer=tokenizer, seed=seed)}'",
        f"trainer.default_local_dir='{folder}/sft'",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
    ]
    with build_sft(prepare_config(SFTConfig, keys, recipe="tiny/code_sft").config) as trainer:
        trainer.fit()
        trainer.state.write_huggingface(folder / "done", True)
    return folder / "done"


def run(seed: int, steps: int, *overrides: str) -> tuple[list[float], float]:
    """Return the share of held-out questions that is solved at each look, and the seconds of the run."""
    folder = WORK / f"run_{seed}_{len(overrides)}"
    shutil.rmtree(folder, ignore_errors=True)
    keys = [
        f"actor_rollout_ref.model.path='{warm_start(seed)}'",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.total_training_steps={steps}",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        *overrides,
    ]
    started = time.perf_counter()
    with build(prepare_config(PPOConfig, keys, recipe="tiny/code").config) as trainer:
        trainer.fit()
    lines = read_metrics(folder / "metrics.jsonl")
    curve = [lines[step][METRIC] for step in sorted(lines) if METRIC in lines[step]]
    return curve, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    rows = []
    missed = []
    for seed in options.seeds.split(","):
        for name, overrides in (("test cases of the question", ()), ("shuffled test cases", (SHUFFLED,))):
            curve, seconds = run(int(seed), options.steps, *overrides)
            print(f"seed {seed}, {name}: {curve}, {seconds:.0f} s", flush=True)
            looks = " · ".join(f"{value:.2f}" for value in curve)
            rows.append(
                f"| {name} | {seed} | {curve[0]:.2f} | **{curve[-1]:.2f}** | {looks} | {seconds:.0f} |"
            )
            gained = curve[-1] - curve[0] >= GAIN
            if gained == bool(overrides):
                missed.append(f"- seed {seed}, {name}: {curve[0]:.2f} to {curve[-1]:.2f}")
        write_page(options.steps, rows, missed)
    raise SystemExit(bool(missed))


def write_page(steps: int, rows: list[str], missed: list[str]) -> None:
    """Write what was found so far."""
    text = [
        "# One-line functions, learned from hidden test cases\n",
        f"{datetime.date.today().isoformat()} · `python benchmarks/code_task.py` · {machine()}\n",
        "Written by benchmarks/code_task.py; do not edit. A model of 0.4 M parameters is asked for a",
        'function ("plus 3 times 12"), and writes `def f(x): return (x + 3) * 12`. A warm-up teaches the',
        f"form, with a wrong number in most answers; {steps} steps of GRPO (`recipes/tiny/code.yaml`) see",
        "only the share of hidden test cases that pass in the sandbox. The control's training questions",
        "have the test cases of other questions. Numbers are the shares of 256 held-out questions that are",
        "solved, sampled at temperature 1.\n",
        "| trained on | seed | before | after | looks | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    if missed:
        text += ["\nNot as wanted:\n", *missed]
    PAGE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
