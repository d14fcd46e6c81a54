"""Rewards that take seconds a row: scored after generation, and while other rows are still generated.

    python benchmarks/reward_overlap.py [--rows 64] [--seconds 2] [--workers 8] [--longest 512] [--steps 3]
        [--processes 2]      # writes benchmarks/results/reward_overlap.md

A tiny model with random weights generates `rows` responses a step, of `longest`/4 to `longest` tokens in four
lengths. The reward function sleeps `seconds` a row, in `reward.num_workers` processes. Steps of both kinds
take turns in one run; a line each has the seconds of generation, of waiting for rewards, and of the step.
With several `processes` the run is under Ray.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.rollout.base import GenerationRequest
from hybridflow.trainer.ppo.build import PPOTrainer, build
from hybridflow.workers import RolloutGroup
from hybridflow.workers.rollout_group import Finished, Generated

SAMPLES = 4
PAGE = Path(__file__).resolve().parent / "results" / "reward_overlap.md"


class SpreadRollout:
    """A rollout whose responses have four lengths, and which may hand them on only when all are there."""

    def __init__(self, rollout: RolloutGroup, longest: int, *, all_at_once: bool) -> None:
        self.rollout = rollout
        self.longest = longest
        self.all_at_once = all_at_once

    def generate(self, requests: Sequence[GenerationRequest], *, finished: Finished) -> Generated:
        """Generate as `RolloutGroup.generate` does."""
        spread = [
            replace(
                request,
                sampling=replace(
                    request.sampling,
                    max_tokens=self.longest * (1 + request.request_id % 4) // 4,
                    ignore_eos=True,
                ),
            )
            for request in requests
        ]
        if not self.all_at_once:
            return self.rollout.generate(spread, finished=finished)
        made = self.rollout.generate(spread)
        for output in made.outputs:
            finished(output)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)


def config(folder: Path, options: argparse.Namespace) -> PPOConfig:
    """Return the settings of a GRPO run whose reward sleeps."""
    reward = folder / "reward.py"
    reward.write_text(
        f"import time\n\n\ndef compute_score(**row):\n    time.sleep({options.seconds})\n    return 1.0\n"
    )
    settings = [
        f"actor_rollout_ref.model.path={create_tiny_model(folder / 'model')}",
        "data.task.name=arithmetic_chain",
        "data.task.size=512",
        f"data.train_batch_size={options.rows // SAMPLES}",
        "data.max_prompt_length=32",
        f"data.max_response_length={options.longest}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.rows // SAMPLES}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"reward.num_workers={options.workers}",
        f"reward.custom_reward_function.path={reward}",
        f"trainer.n_gpus_per_node={options.processes}",
        f"trainer.controller={'ray' if options.processes > 1 else 'local'}",
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={2 * options.steps}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    return prepare_config(PPOConfig, settings).config


def train_step(trainer: PPOTrainer, step: int) -> tuple[float, float, float]:
    """Return the seconds of generation, of waiting for rewards, and of the whole step."""
    started = time.perf_counter()
    trainer.step(trainer.source.next(step).rows, step)
    seconds = time.perf_counter() - started
    return trainer.source.timer.seconds("gen"), trainer.source.timer.seconds("reward"), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    lines: list[tuple[str, float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder, build(config(Path(folder), options)) as trainer:
        rollout = trainer.source.roles.rollout
        rollout.update_from(trainer.step.roles.actor, 0)
        for step in range(2 * options.steps):
            after_all = step % 2 == 0
            spread = SpreadRollout(rollout, options.longest, all_at_once=after_all)
            trainer.source.roles = replace(trainer.source.roles, rollout=spread)  # type: ignore[arg-type]
            what = "after generation" if after_all else "while others are generated"
            lines.append((what, *train_step(trainer, step + 1)))
            print(
                "scored {}: {:.1f} s generation, {:.1f} s waiting, {:.1f} s step".format(*lines[-1]),
                flush=True,
            )
    write_page(options, lines)


def write_page(options: argparse.Namespace, lines: Sequence[tuple[str, float, float, float]]) -> None:
    """Add the medians of a run to the page, in place of those of an earlier run with as many processes."""
    heading = f"## {options.processes} process{'es, under Ray' if options.processes > 1 else ''}\n"
    rows = []
    for what in dict.fromkeys(line[0] for line in lines):
        of_kind = [line[1:] for line in lines if line[0] == what]
        medians = [statistics.median(values) for values in zip(*of_kind)]
        spread = f"{min(values[2] for values in of_kind):.1f}-{max(values[2] for values in of_kind):.1f}"
        rows.append(f"| {what} | {medians[0]:.1f} | {medians[1]:.1f} | {medians[2]:.1f} | {spread} |")
    part = "\n".join(
        [
            heading,
            f"{options.rows} rows a step, {options.longest // 4} to {options.longest} tokens; "
            f"{options.seconds:g} s a row in {options.workers} reward processes; medians of "
            f"{options.steps} steps of each kind in turn, on {cpu_name()}, {os.cpu_count()} threads.\n",
            "| scored | generation s | waiting for rewards s | step s | least-most s |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )
    others = []
    if PAGE.exists():
        others = [f"## {each}" for each in PAGE.read_text().split("\n## ")[1:]]
    parts = [each.strip() + "\n" for each in others if not each.startswith(heading.strip() + "\n")]
    title = "# Seconds of a step whose reward is slow\n\nWritten by `benchmarks/reward_overlap.py`.\n"
    PAGE.write_text("\n".join([title, *sorted([*parts, part])]))


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
