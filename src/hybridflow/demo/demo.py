"""The demo: a model of 0.4 M parameters learns arithmetic chains by imitation, then by reinforcement.

tiny model ──SFT until half right──► warm model ──a tiny recipe──► better model ──► summary.json, report.html
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.demo.warm_up import (
    MAX_TOKENS,
    Evaluation,
    WarmUpOptions,
    evaluate,
    held_out_questions,
    warm_up,
)
from hybridflow.errors import ConfigError
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.machine import machine_facts
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.ppo.build import build as build_ppo
from hybridflow.trainer.run_folder import RunFolder

logger = logging.getLogger(__name__)

REWARD = "arithmetic_chain"
NUM_SHOWN = 5
VALIDATE_EVERY = 20
"""Steps between two validations, which take as long as two training steps."""
VALIDATION = "val-core/arithmetic_chain/acc/mean@1"
"""The metric of a run's own greedy validation on the held-out questions."""


@dataclass(frozen=True)
class DemoOptions:
    """Choices of the command line."""

    folder: Path
    algorithm: str = "grpo"
    """A recipe of the folder `recipes/tiny` that needs nothing but a policy."""
    experts: int = 0
    """Experts in each layer of the model; 0: the layers are dense."""
    seed: int = 0
    reward: str = REWARD
    """`random` is the control: a reward that knows nothing must not help."""
    sft_accuracy: float = 0.5
    """Greedy accuracy at which the warm-up ends."""
    overrides: tuple[str, ...] = ()
    """Further overrides of the reinforcement-learning run."""


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Run the demo from a new model on; write and return the summary: accuracies, seconds, machine."""
    start = time.perf_counter()
    if options.experts < 0 or options.experts == 1:
        raise ConfigError(f"--experts {options.experts}: wanted 0, or 2 and more: a token has two")
    if options.algorithm == "moe" and not options.experts:
        raise ConfigError("--algo moe trains a mixture of experts: give their number too, as in --experts 4")
    folder = RunFolder(options.folder / options.algorithm)
    model = create_tiny_model(options.folder / "model", experts=options.experts, seed=options.seed)
    logger.info(
        "a model of its own: %s architecture, random weights, in %s",
        "Mixtral" if options.experts else "Llama",
        model,
    )
    warm = warm_up(
        model, options.folder / "sft", seed=options.seed, options=WarmUpOptions(options.sft_accuracy)
    )
    logger.info("warm-up done in %.0f s (%d steps); reinforcement learning starts", warm.seconds, warm.steps)
    before, after, trained = reinforce(options, warm.model, folder)
    summary = {
        "algorithm": options.algorithm,
        "seed": options.seed,
        "reward": options.reward,
        "greedy_before": before.greedy,
        "greedy_after": after.greedy,
        "sampled_before": before.sampled.accuracy,
        "sampled_after": after.sampled.accuracy,
        "num_questions": len(before.sampled.samples),
        "sft_steps": warm.steps,
        "seconds_sft": warm.seconds,
        "seconds_rl": trained,
        "seconds": time.perf_counter() - start,
        **machine_facts(),
        "samples_before": before.sampled.samples[:NUM_SHOWN],
        "samples_after": after.sampled.samples[:NUM_SHOWN],
    }
    folder.write_summary(summary)
    summary["report"] = str(write_report(folder.path, folder.path / "report.html"))
    return summary


def reinforce(options: DemoOptions, model: Path, folder: RunFolder) -> tuple[Accuracies, Accuracies, float]:
    """Train the warm model in the folder `model` by RL; gives accuracies before and after, and seconds."""
    overrides = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{folder.path}'",
        f"trainer.seed={options.seed}",
        "trainer.resume_mode=disable",
        f"trainer.test_freq={VALIDATE_EVERY}",
    ]
    if options.reward != REWARD:
        overrides.append(f"reward.function={options.reward}")
    overrides += options.overrides
    config, notes, _ = prepare_config(PPOConfig, overrides, recipe=f"tiny/{options.algorithm}")
    for note in notes:
        logger.info("note: %s", note)
    with build_ppo(config) as trainer:
        questions = held_out_questions(trainer.source.pipeline.tokenizer, seed=options.seed)
        trainer.source.publish(0)
        before = _answers(trainer, questions, options)
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        after = _answers(trainer, questions, options)
    if _validates_the_same(options):
        first, *_, last = _validations(folder.path)
        return Accuracies(first, before["sampled"]), Accuracies(last, after["sampled"]), seconds
    return _accuracies(before), _accuracies(after), seconds


@dataclass(frozen=True)
class Accuracies:
    """Held-out accuracy of a policy: greedy, and sampled with the answers."""

    greedy: float
    sampled: Evaluation


def _accuracies(answers: Mapping[str, Evaluation]) -> Accuracies:
    return Accuracies(answers["greedy"].accuracy, answers["sampled"])


def _validates_the_same(options: DemoOptions) -> bool:
    """Tell whether the run's own first and last validations are the greedy evaluations."""
    return options.reward == REWARD and not options.overrides


def _validations(run: Path) -> list[float]:
    """Return the greedy accuracies that the run has measured, in the order of its steps."""
    lines = read_metrics(run / "metrics.jsonl")
    return [lines[step][VALIDATION] for step in sorted(lines) if VALIDATION in lines[step]]


def _answers(
    trainer: PPOTrainer, questions: MapDataset[PromptRow], options: DemoOptions
) -> dict[str, Evaluation]:
    """Evaluate the policy sampled, and greedily where the run's own validation does not."""
    ways = ["sampled"]
    if not _validates_the_same(options):
        ways.append("greedy")
    source = trainer.source
    return {
        way: evaluate(
            source.roles.rollout,
            source.pipeline.tokenizer,
            questions,
            max_tokens=MAX_TOKENS,
            greedy=way == "greedy",
            seed=options.seed,
        )
        for way in ways
    }
