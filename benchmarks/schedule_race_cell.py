"""One job of the race in a process of its own: make a warm start, or run one schedule from it.

    python benchmarks/schedule_race_cell.py {warm,run} --seed N [--name CELL] --steps N --work FOLDER
    (schedule_race.py starts these)

tiny model ──SFT──► warm start ──GRPO by a schedule──► WORK/cells/CELL_SEED.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import schedule_race_task as task
from learn_settings import write_json

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger
from hybridflow.trainer.sft.build import build as build_sft

GROUPS = 32
SAMPLES = 4
STEPS = 16
WARM_STEPS = 80
HELD_OUT = 256
TASK = f"{Path(task.__file__).resolve()}"
SHARED = (
    f"data.task.name='{TASK}:Letters'",
    "data.task.size=6400",
    f"data.task.val_size={HELD_OUT}",
)
APART = (
    "trainer.controller=ray",
    "trainer.resource_pools={train: [1], generate: [1]}",
    "trainer.placement={rollout: generate}",
    "ray_kwargs.ray_init.num_cpus=2",
    "trainer.heartbeat_timeout=600",
    "trainer.startup_timeout=900",
)
AHEAD = {"one_step_off": (), "exact_async": ("trainer.async.run_ahead=2",), "sync": ()}
SCORE = "critic/score/mean"
HELD_OUT_SCORE = "val-core/letters/reward/mean@1"


def warm_folder(work: Path, seed: int) -> Path:
    """Where the warm start of a seed is kept, with `warm.json` written last."""
    return work / f"warm_{seed}"


def make_warm_start(seed: int, work: Path) -> None:
    """Have a new model read answers of the right lengths, with some right letters."""
    folder = warm_folder(work, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model = create_tiny_model(folder / "model", seed=seed)
    keys = [
        *SHARED,
        f"model.path='{model}'",
        "data.max_length=192",
        f"trainer.default_local_dir='{folder}/sft'",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={WARM_STEPS}",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
    ]
    began = time.perf_counter()
    with build_sft(prepare_config(SFTConfig, keys, recipe="tiny/sft").config) as trainer:
        trainer.fit()
        trainer.state.write_huggingface(folder / "done", True)
    write_json(folder / "warm.json", {"steps": WARM_STEPS, "seconds": time.perf_counter() - began})


def _shared(model: Path) -> list[str]:
    return [
        *SHARED,
        "data.max_prompt_length=64",
        f"data.max_response_length={task.MAX_RESPONSE}",
        f"actor_rollout_ref.model.path='{model}'",
    ]


def run(name: str, seed: int, steps: int, work: Path) -> None:
    """Train from the warm start, and write what the run was like."""
    schedule, _, apart = name.partition("/")
    folder = work / "runs" / f"{name.replace('/', '_')}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    keys = [
        *_shared(warm_folder(work, seed) / "done"),
        f"data.train_batch_size={GROUPS}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS // 2}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"reward.custom_reward_function.path='{TASK}'",
        "reward.function=auto",
        "reward.num_workers=2",
        "algorithm.rollout_correction.rollout_is=token",
        f"trainer.schedule={schedule}",
        *AHEAD.get(schedule, ("trainer.async.run_ahead=1", "trainer.async.max_staleness=3")),
        *(APART if apart else ()),
        f"trainer.default_local_dir='{folder}'",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
    ]
    began = time.perf_counter()
    with build(prepare_config(PPOConfig, keys, recipe="tiny/grpo").config) as trainer:
        trainer.fit()
    whole = time.perf_counter() - began
    facts = {"whole_seconds": round(whole, 1), "load": round(os.getloadavg()[0], 1)}
    write_json(work / "cells" / f"{folder.name}.json", found(name, seed, folder) | facts)


def found(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return what a finished run has logged."""
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [lines[step] for step in sorted(lines) if step]
    staleness = {0: GROUPS * len(steps)}
    if (folder / LEDGER_FILE).exists():
        with Ledger(folder / LEDGER_FILE) as ledger:
            staleness = dict(sorted(ledger.state.staleness.items()))
    return {
        "name": name,
        "seed": seed,
        "score": [round(line[SCORE], 4) for line in steps],
        "seconds": [round(line["perf/time_per_step"], 4) for line in steps],
        "tokens": [line["rollout/generated_tokens"] for line in steps],
        "trainer_idle": [round(trainer_idle(line), 4) for line in steps],
        "rollout_idle": [round(rollout_idle(line), 4) for line in steps],
        "weights": [round(line["timing_s/update_weights"], 4) for line in steps],
        "length": [round(line["response_length/mean"], 2) for line in steps],
        "longest": max(line["response_length/max"] for line in steps),
        "staleness": staleness,
        "stalest_token": max(
            line.get("training/off_policy/trajectory_staleness_worst/max", 0.0) for line in steps
        ),
        "held_out": steps[-1][HELD_OUT_SCORE],
    }


def trainer_idle(line: dict[str, float]) -> float:
    """Return the share of a step in which the trainer waited for its batch.

    Nothing goes on beside a synchronous step, so its own timings say it.
    """
    waited = line["timing_s/gen"] + line.get("timing_s/reward", 0.0)
    return line.get("fully_async/trainer/idle_ratio", waited / line["perf/time_per_step"])


def rollout_idle(line: dict[str, float]) -> float:
    """Return the share of a step in which the engine answered no request."""
    return line.get("fully_async/rollouter/idle_ratio", 1 - line["timing_s/gen"] / line["perf/time_per_step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["warm", "run"])
    parser.add_argument("--name", default="")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    setup_logging()
    if options.what == "warm":
        make_warm_start(options.seed, options.work)
    else:
        run(options.name, options.seed, options.steps, options.work)


if __name__ == "__main__":
    main()
