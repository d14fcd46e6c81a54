"""Does `hybridflow why` find what makes a run slow, and does its forecast hold? Ten runs with one cause each.

    python benchmarks/why.py MODEL [--only rewards …] [--steps 6]

MODEL is a folder with a warm tiny model (`DEMO/sft/model` after `hybridflow demo --out DEMO`). Each run is a
tiny recipe with keys that make it slow in one way. `why` reads its folder; the first override that it gives
is then tried in a second run, and the seconds saved are compared with the forecast. Writes
`benchmarks/results/why.json` and `.md`. Wanted: the cause first in nine of ten, and the forecast within 30 %
of what the change gave in seven.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import side_by_side as kit

HERE = Path(__file__).resolve().parents[1]
CLOSE = 0.3
"""Part of what a change gave by which its forecast may be wrong."""
SLOW_SCORE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.01)
    return float(str(ground_truth) in solution_str)
"""
SLOW_GAME = """
import time
from hybridflow.environments.built_in import Guess

class Slow(Guess):
    def step(self, text):
        time.sleep(0.02)
        return super().step(text)
"""
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
TINY_BATCH = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2")
SMALL_BATCH = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8")


@dataclass(frozen=True)
class Plant:
    """Keys that make a run slow, and the cause that is to be found."""

    cause: str
    keys: tuple[str, ...]
    recipe: str = "tiny/grpo"


PLANTS = {
    "micro_batches": Plant("micro_batches", (f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",)),
    "few_rows": Plant("few_rows", (f"{ROLLOUT}.max_num_seqs=16",)),
    "rewards": Plant("rewards", ("reward.function=FOLDER/slow.py:compute_score",)),
    "one_scorer": Plant(
        "rewards", ("reward.function=FOLDER/slow.py:compute_score", "reward.num_workers=1", *SMALL_BATCH)
    ),
    "validations": Plant("validations", ("trainer.test_freq=1",)),
    "checkpoints": Plant("checkpoints", ("trainer.save_freq=1", *TINY_BATCH)),
    "recomputation": Plant("recomputation", ("actor_rollout_ref.model.enable_gradient_checkpointing=true",)),
    "log_probs_again": Plant(
        "log_probs_again",
        (f"{ROLLOUT}.exact=false", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=80"),
    ),
    "idle_reference": Plant("idle_reference", (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0")),
    "tools": Plant(
        "tools",
        ("data.environment=FOLDER/game.py:Slow", f"{ROLLOUT}.agent.num_workers=1"),
        recipe="tiny/guess",
    ),
}


def train(model: Path, plant: Plant, folder: Path, keys: list[str], steps: int) -> None:
    """Run some steps of a recipe in a process of its own."""
    words = [
        *("--recipe", plant.recipe, f"actor_rollout_ref.model.path={model}"),
        *(f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}"),
        *("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *("trainer.logger=[jsonl]", *keys),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow.cli.main", "train", *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{plant.cause}: {done.stderr[-2000:]}")


def why(*words: str) -> Any:
    """Return what `hybridflow why` says."""
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow.cli.main", "why", *words, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def measure(model: Path, name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Plant a cause, ask why, try what is advised, and return what was found."""
    plant = PLANTS[name]
    (folder / "slow.py").write_text(SLOW_SCORE)
    (folder / "game.py").write_text(SLOW_GAME)
    keys = [key.replace("FOLDER", str(folder)) for key in plant.keys]
    train(model, plant, folder / name, keys, steps)
    found = why(str(folder / name))
    first = found["waits"][0]
    tried = first["overrides"]
    kept = [key for key in keys if key.partition("=")[0] != first["key"]]
    train(model, plant, folder / f"{name}-tried", [*kept, *tried], steps)
    after = why(str(folder / name), "--tried", str(folder / f"{name}-tried"))
    before, now = after["seconds"]
    return {
        "plant": name,
        "cause": first["cause"],
        "found": first["cause"] == plant.cause,
        "tried": " ".join(tried),
        "before": before,
        "after": now,
        "forecast": first["saved"],
        "saved": before - now,
        "holds": abs(first["saved"] - (before - now)) <= CLOSE * abs(before - now),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", default=list(PLANTS), choices=list(PLANTS))
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    found = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(options.model, name, Path(folder), options.steps))
        print(json.dumps(found[-1]), flush=True)
    if options.only == list(PLANTS):
        write(found)


def write(found: list[dict[str, Any]]) -> None:
    """Write the page."""
    rows = [
        [
            one["plant"],
            one["cause"] if one["found"] else f"**{one['cause']}**",
            f"`{one['tried']}`",
            f"{one['before']:.2f}",
            f"{one['after']:.2f}",
            f"{one['forecast']:.2f}",
            f"{one['saved']:.2f}",
            "yes" if one["holds"] else "**no**",
        ]
        for one in found
    ]
    head = [
        "planted",
        "first in the list",
        "tried",
        "s a step",
        "then",
        "forecast to save",
        "saved",
        "within 30 %",
    ]
    right = sum(one["found"] for one in found)
    close = sum(one["holds"] for one in found)
    text = (
        f"The cause is first in {right} of {len(found)} (wanted 9); the forecast is within 30 % of what the "
        f"change gave in {close} (wanted 7)."
    )
    result = {**kit.facts(("torch", "transformers"), threads=1), "runs": found}
    kit.write("why", result, "Why is this run slow?", f"{text}\n\n{kit.table(head, rows)}")


if __name__ == "__main__":
    main()
