"""Does `hybridflow why` find what makes a run slow, and does its forecast hold? Ten runs with one cause each.

    python benchmarks/why.py MODEL [--only rewards …]        (six minutes of two quiet cores)

MODEL is a folder with a warm tiny model (`DEMO/sft/model` after `hybridflow demo --out DEMO`). Each run is a
tiny recipe with keys that make it slow in one way. A first look of three steps says which override to try.
The run and that with the override are then made side by side, one thread each, so that what else the machine
does slows both: the seconds that were saved are compared with the forecast. Where a run computes, its clock
is CPU time, since other processes share the machine; where it waits, the clock on the wall. Writes
`benchmarks/results/why.json` and `.md`. Wanted: the cause first in nine of ten, and the forecast within 30 %
of what the change gave in seven.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import side_by_side as kit

CLOSE = 0.3
"""Part of what a change gave by which its forecast may be wrong."""
LOOK = 3
"""Steps of the run that says what to try."""
SLOW_SCORE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    return float(str(ground_truth) in solution_str)
"""
SLOW_GAME = """
import time
from hybridflow.environments.built_in import Guess

class Slow(Guess):
    def reset(self, row):
        time.sleep(0.02)
        return super().reset(row)
"""
CLOCKS = {False: "process_time", True: "perf_counter"}
"""The clock of a run, by whether it waits."""
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
TINY_BATCH = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2")
SMALL_BATCH = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16")


@dataclass(frozen=True)
class Plant:
    """Keys that make a run slow, and the cause that is to be found."""

    cause: str
    keys: tuple[str, ...]
    recipe: str = "tiny/grpo"
    steps: int = 8
    waits: bool = False
    """Whether it waits for something, so that CPU time does not tell how long it takes."""


PLANTS = {
    "micro_batches": Plant("micro_batches", (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", *SMALL_BATCH)),
    "few_rows": Plant("few_rows", (f"{ROLLOUT}.max_num_seqs=4", *SMALL_BATCH)),
    "rewards": Plant("rewards", ("reward.function=FOLDER/slow.py:compute_score", *SMALL_BATCH), waits=True),
    "one_scorer": Plant(
        "rewards",
        ("reward.function=FOLDER/slow.py:compute_score", "reward.num_workers=1", *SMALL_BATCH),
        waits=True,
    ),
    "validations": Plant("validations", ("trainer.test_freq=1", *SMALL_BATCH)),
    "checkpoints": Plant("checkpoints", ("trainer.save_freq=1", *TINY_BATCH), steps=24),
    "recomputation": Plant("recomputation", ("actor_rollout_ref.model.enable_gradient_checkpointing=true",)),
    "log_probs_again": Plant(
        "log_probs_again",
        (f"{ROLLOUT}.exact=false", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=80", *SMALL_BATCH),
    ),
    "idle_reference": Plant("idle_reference", (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0")),
    "tools": Plant(
        "tools",
        (
            *("data.environment=FOLDER/game.py:Slow", f"{ROLLOUT}.agent.num_workers=1"),
            *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"),
        ),
        recipe="tiny/guess",
        waits=True,
    ),
}


def serve(clock: str) -> None:
    """In a side: import the library once, and train at the same time what each question asks for."""
    time.perf_counter = getattr(time, clock)  # before the timer of a run takes it
    import transformers  # noqa: F401

    import hybridflow.trainer.ppo.build  # noqa: F401
    from hybridflow.cli.main import main

    kit.say({})
    while True:
        runs = []
        for words in kit.next_question():
            runs.append(os.fork())
            if not runs[-1]:
                os.dup2(2, 1)
                os._exit(main(["train", *words]))
        kit.say({"exits": [os.waitpid(run, 0)[1] for run in runs]})


def words_of(model: Path, plant: Plant, folder: Path, keys: Sequence[str], steps: int) -> list[str]:
    """Return the overrides of some steps of a recipe."""
    return [
        *("--recipe", plant.recipe, f"actor_rollout_ref.model.path={model}"),
        *(f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}"),
        *("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *("trainer.logger=[jsonl]", *keys),
    ]


def train(side: kit.Side, runs: list[list[str]]) -> None:
    """Train at the same time. SystemExit where a run has failed."""
    if any(side.ask(runs)["exits"]):
        raise SystemExit("a run has failed, and said why above")


def measure(model: Path, name: str, folder: Path, side: kit.Side) -> dict[str, Any]:
    """Plant a cause, ask why, try what is advised, and return what was found."""
    from hybridflow.trainer.why.rules import waits_of
    from hybridflow.trainer.why.run_times import RunTimes

    plant = PLANTS[name]
    (folder / "slow.py").write_text(SLOW_SCORE)
    (folder / "game.py").write_text(SLOW_GAME)
    keys = [key.replace("FOLDER", str(folder)) for key in plant.keys]
    train(side, [words_of(model, plant, folder / "look", keys, LOOK)])
    tried = waits_of(RunTimes.read(folder / "look"))[0].overrides
    changed = {override.partition("=")[0] for override in tried}
    kept = [key for key in keys if key.partition("=")[0] not in changed]
    slow_words = words_of(model, plant, folder / "slow", keys, plant.steps)
    train(side, [slow_words, words_of(model, plant, folder / "tried", [*kept, *tried], plant.steps)])
    slow = RunTimes.read(folder / "slow")
    first = waits_of(slow)[0]
    after = RunTimes.read(folder / "tried").seconds
    saved = slow.seconds - after
    forecast = first.saved or 0.0
    return {
        "plant": name,
        "cause": first.cause,
        "found": first.cause == plant.cause,
        "tried": " ".join(tried),
        "before": slow.seconds,
        "after": after,
        "forecast": forecast,
        "saved": saved,
        "holds": abs(forecast - saved) <= CLOSE * abs(saved),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--clock", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", default=list(PLANTS), choices=list(PLANTS))
    options = parser.parse_args()
    if options.clock:
        serve(options.clock)
    import torch

    torch.set_num_threads(1)  # as the runs, whose machine is measured here
    before = os.getloadavg()[0]
    commands = {clock: kit.own_command(__file__, "--clock", clock) for clock in CLOCKS.values()}
    found = []
    with kit.open_sides(commands, 1) as sides:
        for name in options.only:
            with tempfile.TemporaryDirectory() as folder:
                side = sides[CLOCKS[PLANTS[name].waits]]
                found.append(measure(options.model, name, Path(folder), side))
            print(json.dumps(found[-1]), flush=True)
    if options.only == list(PLANTS):
        write(found, before)


def write(found: list[dict[str, Any]], load: float) -> None:
    """Write the page. `load`: processes that wanted a core when it began."""
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
        f"change gave in {close} (wanted 7). When it began {load:.1f} other processes wanted a core."
    )
    result = {**kit.facts(("torch", "transformers"), threads=1), "load": load, "runs": found}
    kit.write("why", result, "Why is this run slow?", f"{text}\n\n{kit.table(head, rows)}")


if __name__ == "__main__":
    main()
