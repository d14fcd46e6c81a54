"""The demo: a language model of 0.4 M parameters learns arithmetic chains, first by imitation, then by
reinforcement.

tiny model ──SFT until half right──► warm model ──GRPO, or another tiny recipe──► better model ──►
summary.json, report.html
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.machine import machine_facts
from hybridflow.observability.report import write_report
from hybridflow.trainer.demo.evaluate import MAX_TOKENS, Evaluation, evaluate
from hybridflow.trainer.demo.warm_up import WarmUpOptions, held_out_questions, warm_up
from hybridflow.trainer.ppo.build import build as build_ppo
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.workers import RolloutGroup

logger = logging.getLogger(__name__)

REWARD = "arithmetic_chain"
NUM_SHOWN = 5


@dataclass(frozen=True)
class DemoOptions:
    """Choices of the command line."""

    folder: Path
    algorithm: str = "grpo"
    """A recipe of the folder `recipes/tiny` that needs nothing but a policy."""
    seed: int = 0
    reward: str = REWARD
    """`random` is the control: a reward that knows nothing must not help."""
    sft_accuracy: float = 0.5
    """Greedy accuracy at which the warm-up ends."""
    overrides: tuple[str, ...] = ()
    """Further overrides of the reinforcement-learning run."""


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Run the demo from a new model on; gives and writes the summary: accuracies before and after, seconds, machine."""
    start = time.perf_counter()
    folder = RunFolder(options.folder / options.algorithm)
    model = create_tiny_model(options.folder / "model", seed=options.seed)
    logger.info("a model of its own: Llama architecture, 0.4 M parameters, random weights, in %s", model)
    warm = warm_up(
        model, options.folder / "sft", seed=options.seed, options=WarmUpOptions(options.sft_accuracy)
    )
    logger.info("warm-up done in %.0f s (%d steps); reinforcement learning starts", warm.seconds, warm.steps)
    before, after, trained = reinforce(options, warm.model, folder)
    summary = {
        "algorithm": options.algorithm,
        "seed": options.seed,
        "reward": options.reward,
        "greedy_before": before[0].accuracy,
        "greedy_after": after[0].accuracy,
        "sampled_before": before[1].accuracy,
        "sampled_after": after[1].accuracy,
        "num_questions": len(before[0].samples),
        "sft_steps": warm.steps,
        "seconds_sft": warm.seconds,
        "seconds_rl": trained,
        "seconds": time.perf_counter() - start,
        **machine_facts(),
        "samples_before": before[1].samples[:NUM_SHOWN],
        "samples_after": after[1].samples[:NUM_SHOWN],
    }
    folder.write_summary(summary)
    summary["report"] = str(write_report(folder.path, folder.path / "report.html"))
    return summary


def reinforce(
    options: DemoOptions, model: Path, folder: RunFolder
) -> tuple[tuple[Evaluation, Evaluation], tuple[Evaluation, Evaluation], float]:
    """Train the warm model in the folder `model` by RL; gives its (greedy, sampled) evaluations before and after, and
    the seconds of training.
    """
    overrides = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{folder.path}'",
        f"trainer.seed={options.seed}",
        "trainer.resume_mode=disable",
    ]
    if options.reward != REWARD:
        overrides.append(f"reward.function={options.reward}")
    overrides += options.overrides
    config, notes, _ = prepare_config(PPOConfig, overrides, recipe=f"tiny/{options.algorithm}")
    for note in notes:
        logger.info("note: %s", note)
    with build_ppo(config) as trainer:
        tokenizer = trainer.tokenizer
        rollout = trainer.trajectories.rollout
        questions = held_out_questions(tokenizer, seed=options.seed)
        rollout.update_from(trainer.step.roles.actor, 0)
        before = _both(rollout, tokenizer, questions, options.seed)
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        after = _both(rollout, tokenizer, questions, options.seed)
    return before, after, seconds


def _both(
    rollout: RolloutGroup, tokenizer: Tokenizer, questions: MapDataset[PromptRow], seed: int
) -> tuple[Evaluation, Evaluation]:
    greedy = evaluate(rollout, tokenizer, questions, max_tokens=MAX_TOKENS, greedy=True, seed=seed)
    return greedy, evaluate(rollout, tokenizer, questions, max_tokens=MAX_TOKENS, greedy=False, seed=seed)
