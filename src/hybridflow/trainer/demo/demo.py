"""The demo: a language model of 0.4 M parameters learns arithmetic chains, first by imitation, then by reinforcement.

tiny model ──SFT until half right──► warm model ──GRPO or PPO──► better model ──► summary.json, report.html
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.build import build_prompt_data
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.report import write_report
from hybridflow.rollout.base import RolloutEngine
from hybridflow.trainer.demo.evaluate import Evaluation, evaluate
from hybridflow.trainer.ppo.build import build as build_ppo
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.sft.build import build as build_sft

logger = logging.getLogger(__name__)

CHECK_EVERY = 5
"""SFT steps between two looks at the held-out accuracy: it climbs steeply once it climbs."""
FIRST_CHECK = 60
"""No look before this step: no seed is near the mark by then."""
NUM_SHOWN = 5


@dataclass(frozen=True)
class DemoOptions:
    """What the command line can change."""

    folder: Path
    algorithm: str = "grpo"
    seed: int = 0
    reward: str = "arithmetic_chain"
    """`random` is the control: a reward that knows nothing must not help."""
    sft_accuracy: float = 0.5
    """Greedy accuracy at which the warm-up ends."""
    overrides: tuple[str, ...] = ()
    """Further overrides of the reinforcement-learning run."""


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Run the demo from nothing; gives and writes the summary (accuracies before and after, seconds)."""
    start = time.perf_counter()
    folder = RunFolder(options.folder / options.algorithm)
    model = create_tiny_model(options.folder / "model", seed=options.seed)
    logger.info("a model of its own: Llama architecture, 0.4 M parameters, random weights, in %s", model)
    warm, sft = _warm_up(options, model)
    logger.info("warm-up done in %.0f s (%d steps); reinforcement learning starts", sft["seconds"], sft["steps"])
    before, after, trained = _reinforce(options, warm, folder)
    summary = {
        "algorithm": options.algorithm,
        "seed": options.seed,
        "reward": options.reward,
        "greedy_before": before[0].accuracy,
        "greedy_after": after[0].accuracy,
        "sampled_before": before[1].accuracy,
        "sampled_after": after[1].accuracy,
        "num_questions": len(before[0].samples),
        "sft_steps": sft["steps"],
        "seconds_sft": sft["seconds"],
        "seconds_rl": trained,
        "seconds": time.perf_counter() - start,
        "samples_before": before[1].samples[:NUM_SHOWN],
        "samples_after": after[1].samples[:NUM_SHOWN],
    }
    folder.write_summary(summary)
    summary["report"] = str(write_report(folder.path, folder.path / "report.html"))
    return summary


def _warm_up(options: DemoOptions, model: Path) -> tuple[Path, dict[str, Any]]:
    """SFT until the greedy accuracy is reached; gives the folder of the warm model."""
    start = time.perf_counter()
    overrides = [
        f"model.path='{model}'",
        f"trainer.default_local_dir='{options.folder / 'sft'}'",
        f"trainer.seed={options.seed}",
        "trainer.resume_mode=disable",
        "trainer.logger=[console]",
    ]
    config = prepare_config(SFTConfig, overrides, recipe="demo_sft").config
    logger.info(
        "warm-up: it reads worked answers until %.0f %% of the held-out questions are right, for at most %s steps",
        100 * options.sft_accuracy,
        config.trainer.total_training_steps,
    )
    warm = options.folder / "sft" / "model"
    with build_sft(config) as trainer:
        questions = _questions(load_tokenizer(str(model)), seed=options.seed)

        def good_enough(step: int) -> bool:
            if step < FIRST_CHECK or step % CHECK_EVERY:
                return False
            found = evaluate(trainer.rollout, trainer.tokenizer, questions, max_tokens=48, greedy=True, seed=options.seed)
            logger.info("warm-up step %d: greedy accuracy %.3f on %d held-out questions", step, found.accuracy, len(questions))
            return found.accuracy >= options.sft_accuracy

        steps = trainer.fit(after_step=good_enough)
        trainer.export(warm)
    return warm, {"steps": steps, "seconds": time.perf_counter() - start}


def _reinforce(
    options: DemoOptions, model: Path, folder: RunFolder
) -> tuple[tuple[Evaluation, Evaluation], tuple[Evaluation, Evaluation], float]:
    """RL from the warm model; gives (greedy, sampled) before and after, and the seconds of training."""
    overrides = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{folder.path}'",
        f"trainer.seed={options.seed}",
        f"reward.function={options.reward}",
        "trainer.resume_mode=disable",
        *options.overrides,
    ]
    config, notes, _ = prepare_config(PPOConfig, overrides, recipe=f"demo_{options.algorithm}")
    for note in notes:
        logger.info("note: %s", note)
    with build_ppo(config) as trainer:
        tokenizer, engine = trainer.tokenizer, trainer.rollout_engine
        questions = _questions(tokenizer, seed=options.seed)
        before = _both(engine, tokenizer, questions, options.seed)
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        after = _both(engine, tokenizer, questions, options.seed)
    return before, after, seconds


def _both(engine: RolloutEngine, tokenizer: Tokenizer, questions: MapDataset[PromptRow], seed: int) -> tuple[Evaluation, Evaluation]:
    greedy = evaluate(engine, tokenizer, questions, max_tokens=48, greedy=True, seed=seed)
    return greedy, evaluate(engine, tokenizer, questions, max_tokens=48, greedy=False, seed=seed)


def _questions(tokenizer: Tokenizer, *, seed: int) -> MapDataset[PromptRow]:
    """The held-out questions: the validation split of the demo's task, in neither training set."""
    few = ["actor_rollout_ref.model.path=unused", "data.task.size=64"]  # training questions are not wanted here
    config = prepare_config(PPOConfig, few, recipe="demo_grpo", make_folders=False).config
    data = build_prompt_data(config.data, tokenizer, seed)
    assert data.val_dataset is not None, "the demo's recipe has held-out questions"
    return data.val_dataset
