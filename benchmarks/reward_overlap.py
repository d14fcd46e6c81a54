"""Rewards that take seconds a row: scored after generation, and while other rows are still generated.

    python benchmarks/reward_overlap.py [--rows 64] [--seconds 2] [--workers 8] [--longest 512] [--steps 2]

A tiny model with random weights generates `rows` responses a step, of `longest`/4 to `longest` tokens in four
lengths. The reward function sleeps `seconds` a row, in `reward.num_workers` processes. Steps of both kinds
take turns in one run; a line each has the seconds of generation, of waiting for rewards, and of the step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.rollout.base import GenerationOutput, GenerationRequest
from hybridflow.trainer.ppo.build import PPOTrainer, build
from hybridflow.workers import RolloutGroup
from hybridflow.workers.rollout import Finished

SAMPLES = 4


class SpreadRollout:
    """A rollout whose responses have four lengths, and which may hand them on only when all are there."""

    def __init__(self, rollout: RolloutGroup, longest: int, *, all_at_once: bool) -> None:
        self.rollout = rollout
        self.longest = longest
        self.all_at_once = all_at_once

    def generate(
        self, requests: Sequence[GenerationRequest], *, finished: Finished
    ) -> list[GenerationOutput]:
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
        outputs = self.rollout.generate(spread)
        for output in outputs:
            finished(output)
        return outputs

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
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={2 * options.steps}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    return prepare_config(PPOConfig, settings).config


def train_step(trainer: PPOTrainer, step: int) -> tuple[float, float, float]:
    """Return the seconds of generation, of waiting for rewards, and of the whole step."""
    trainer.source.timer.reset()
    started = time.perf_counter()
    batch, _ = trainer.source.trajectories.for_training(trainer.source.admitted(), step)
    trainer.step(batch, step)
    seconds = time.perf_counter() - started
    return trainer.source.timer.seconds("gen"), trainer.source.timer.seconds("reward"), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, build(config(Path(folder), options)) as trainer:
        rollout = trainer.source.trajectories.rollout
        rollout.update_from(trainer.step.roles.actor, 0)
        for step in range(2 * options.steps):
            after_all = step % 2 == 0
            spread = SpreadRollout(rollout, options.longest, all_at_once=after_all)
            trainer.source.trajectories.rollout = spread  # type: ignore[assignment]
            generation, waiting, seconds = train_step(trainer, step + 1)
            what = "after generation" if after_all else "while generating"
            print(
                f"scored {what}: generation {generation:6.1f} s, waiting for rewards {waiting:6.1f} s, "
                f"step {seconds:6.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
