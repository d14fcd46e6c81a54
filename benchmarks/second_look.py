"""Is a picture of the second turn read? GRPO on conversations that show one, beside a control that hides it.

    python benchmarks/second_look.py [--seeds 0,1,2]   # writes benchmarks/results/second_look.md

warm start of red_squares.py ──GRPO──► "red ?" · an answer · the picture, "red ?" · the count, which is scored
                                 └──GRPO, the picture of the second turn is empty──► the control

Runs that have ended are kept in second_look/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import time
from collections.abc import Mapping
from typing import Any

from learn_settings import RESULTS, ROOT
from red_squares import Curve, warm_start
from side_by_side import machine

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.tasks.red_squares import RedSquares
from hybridflow.environments import Environment, Step
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import build

WORK = ROOT / "second_look"
PAGE = RESULTS / "second_look.md"
METRIC = "val-core/red_squares/reward/mean@1"
KINDS = {"shown": True, "hidden": False}
"""Whether the picture of the second turn is the row's; the control's is empty."""
GAIN = 0.2
"""Share of the held-out pictures that a run has to count right more than its control at the end: the
difference of two looks at 256 pictures has a standard error of at most 0.045.
"""


class SecondLook(Environment):
    """Asks for the red squares without a picture, whatever is answered, and then with the row's picture."""

    def __init__(self, shows: bool = True) -> None:
        self.shows = shows

    def reset(self, row: Mapping[str, Any]) -> str:
        self.count = row["reward_model"]["ground_truth"]
        self.picture = row["images"][0]["bytes"] if self.shows else RedSquares().draw([0] * 16)
        self.has_shown = False
        return "red ?"

    def step(self, text: str) -> Step:
        if self.has_shown:
            return Step(reward=float(text.strip() == self.count), done=True)
        self.has_shown = True
        return Step([{"type": "image", "bytes": self.picture}, {"type": "text", "text": "red ?"}])


def run(seed: int, shows: bool, steps: int) -> Curve:
    """Train from the warm start of a seed, on one thread."""
    folder = WORK / f"{'shown' if shows else 'hidden'}_{seed}"
    ended = folder / "curve.json"
    if ended.exists():
        return Curve(*json.loads(ended.read_text()))
    warm = warm_start(seed)
    shutil.rmtree(folder, ignore_errors=True)
    keys = [
        f"actor_rollout_ref.model.path='{warm}'",
        f"data.environment='{__file__}:SecondLook'",
        f"data.environment_options={{shows: {str(shows).lower()}}}",
        "actor_rollout_ref.rollout.max_model_len=120",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
    ]
    started = time.process_time()
    with build(prepare_config(PPOConfig, keys, recipe="tiny/vlm").config) as trainer:
        trainer.fit()
    lines = read_metrics(folder / "metrics.jsonl")
    curve = [lines[step][METRIC] for step in sorted(lines) if METRIC in lines[step]]
    found = Curve(curve, time.process_time() - started)
    ended.write_text(json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    rows = []
    missed = []
    for seed in map(int, options.seeds.split(",")):
        ends = {}
        for name, shows in KINDS.items():
            curve = run(seed, shows, options.steps)
            print(f"seed {seed}, {name}: {curve}", flush=True)
            ends[name] = curve.shares[-1]
            looks = " · ".join(f"{share:.2f}" for share in curve.shares)
            rows.append(f"| {name} | {seed} | {looks} | {curve.cpu_seconds:.0f} |")
        if ends["shown"] - ends["hidden"] < GAIN:
            missed.append(f"- seed {seed}: {ends['shown']:.2f}, and the control {ends['hidden']:.2f}")
    write_page(rows, missed, options)
    raise SystemExit(bool(missed))


def write_page(rows: list[str], missed: list[str], options: argparse.Namespace) -> None:
    """Write what was found."""
    command = f"python benchmarks/second_look.py --seeds {options.seeds} --steps {options.steps}"
    text = [
        "# The picture of a second turn\n",
        f"{datetime.date.today().isoformat()} · `{command}` · {machine()}\n",
        "Written by benchmarks/second_look.py; do not edit. A qwen3_vl of 0.3 M parameters, which a short",
        "warm-up has shown some pictures with their counts, is asked how many squares are red, first",
        f"without a picture, and after its answer with it. {options.steps} steps of GRPO see only whether",
        "the second answer is right. The control is the same run with an empty picture in the second turn.",
        "Numbers are the shares of 256 held-out pictures that are counted right, sampled at temperature 1,",
        "before the first step and after the last, on one thread. Before the first step most conversations",
        "end in the first turn, which the warm-up has not seen: it is cut at its fourth token.",
        f"A run has to count {GAIN} more than its control at the end.\n",
        "| picture of the second turn | seed | before · after | CPU seconds |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    if missed:
        text += ["\nNot as wanted:\n", *missed]
    PAGE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
