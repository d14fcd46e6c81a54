"""The demo: a model of 0.4 M parameters learns arithmetic chains by imitation, then by reinforcement.

tiny model ──SFT until half right──► warm model ──a tiny recipe──► better model ──► summary.json, report.html

In the warm-up a new model reads worked answers until it has some questions right.

model folder ──SFT, looking at held-out accuracy now and then──► warm model folder

`evaluate` takes the held-out accuracy of a policy on the task, greedy or sampled, with texts for the reader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.agent.single_turn import build_requests
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.build import build_prompt_data
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.machine import machine_facts
from hybridflow.observability.report import write_report
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.rewards.functions.arithmetic_chain import compute_score
from hybridflow.rollout.base import SamplingParams
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.ppo.build import build as build_ppo
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.sft.build import build as build_sft
from hybridflow.workers import RolloutGroup

logger = logging.getLogger(__name__)
REWARD = "arithmetic_chain"
NUM_SHOWN = 5
VALIDATE_EVERY = 20
"""Steps between two validations, which take as long as two training steps."""
VALIDATION = "val-core/arithmetic_chain/acc/mean@1"
"""The metric of a run's own greedy validation on the held-out questions."""
MAX_TOKENS = 48
"""Longest response, as in the recipes of the tiny task."""
FIRST_LOOK = 256
"""Held-out questions that are tried first; all of them are, once these come near the mark."""
MARGIN = 0.12
"""How near: four standard errors of the accuracy on `FIRST_LOOK` questions."""


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
    """Return whether the run's own first and last validations are the greedy evaluations."""
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


@dataclass(frozen=True)
class Evaluation:
    """Answers of a policy to the held-out questions, and their accuracy."""

    accuracy: float
    """Share of right answers, in [0, 1]."""
    pass_rate: float
    """Share of questions with at least one right answer (pass@n), in [0, 1]; the accuracy where n is 1."""
    mean_length: float
    """Tokens of a response, the end token included."""
    samples: list[dict[str, object]]
    """Each response with its question, truth and score."""


def evaluate(
    rollout: RolloutGroup,
    tokenizer: Tokenizer,
    questions: MapDataset[PromptRow] | Sequence[PromptRow],
    *,
    max_tokens: int,
    greedy: bool,
    seed: int,
    n: int = 1,
) -> Evaluation:
    """Answer each question `n` times with the current weights and score it; sampled at temperature 1."""
    prompts = [questions[index] for index in range(len(questions))]
    sampling = SamplingParams(max_tokens=max_tokens, greedy=greedy)
    batch = build_requests(prompts, sampling, n=n, seed=seed, purpose="demo_evaluation", step=0)
    responses = [output.token_ids for output in rollout.generate(batch.requests).outputs]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    samples: list[dict[str, object]] = []
    scores: list[float] = []
    for prompt, text in zip(batch.rows, texts, strict=True):
        truth = prompt.row["reward_model"]["ground_truth"]
        result = compute_score("arithmetic_chain", text, truth)
        if isinstance(result, dict):
            result = result["score"]
        scores.append(float(result))
        samples.append(
            {
                "question": prompt.row["prompt"][-1]["content"],
                "response": text,
                "ground_truth": truth,
                "score": scores[-1],
            }
        )
    best = [max(scores[start : start + n]) for start in range(0, len(scores), n)]
    return Evaluation(
        accuracy=sum(scores) / len(scores),
        pass_rate=sum(best) / len(best),
        mean_length=sum(len(response) for response in responses) / len(responses),
        samples=samples,
    )


@dataclass(frozen=True)
class WarmUpOptions:
    """Conditions under which the warm-up ends."""

    accuracy: float = 0.5
    """Greedy accuracy on the held-out questions at which it ends."""
    check_every: int = 5
    """Steps between two checks of that accuracy: it climbs steeply once it climbs."""
    first_check: int = 60
    """No check before this step: no seed is near the mark by then."""
    max_steps: int | None = None
    """Most steps, at which it always ends; None: the recipe's."""


@dataclass(frozen=True)
class WarmUp:
    """A warm model: its folder, its last greedy accuracy (0 if never measured), steps and seconds."""

    model: Path
    accuracy: float
    steps: int
    seconds: float


def warm_up(model: Path, folder: Path, *, seed: int, options: WarmUpOptions) -> WarmUp:
    """Fine-tune `model` in the run folder `folder` and write the warm model into `folder/model`."""
    start = time.perf_counter()
    overrides = [
        f"model.path='{model}'",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
    ]
    if options.max_steps is not None:
        overrides.append(f"trainer.total_training_steps={options.max_steps}")
    config = prepare_config(SFTConfig, overrides, recipe="tiny/sft").config
    logger.info(
        "warm-up: it reads worked answers until %.0f %% of the held-out questions are right, for at most %s "
        "steps",
        100 * options.accuracy,
        config.trainer.total_training_steps,
    )
    accuracy = 0.0
    with build_sft(config) as trainer:
        tokenizer = load_tokenizer(str(model))
        questions = held_out_questions(tokenizer, seed=seed)
        rollout = RolloutGroup(trainer.step.group.backend, "rollout")

        def accuracy_on(some: Sequence[PromptRow]) -> float:
            return evaluate(rollout, tokenizer, some, max_tokens=MAX_TOKENS, greedy=True, seed=seed).accuracy

        def good_enough(step: int, logged: dict[str, float]) -> bool:
            nonlocal accuracy
            if step < options.first_check or step % options.check_every:
                return False
            some = [questions[index] for index in range(min(FIRST_LOOK, len(questions)))]
            accuracy = accuracy_on(some)
            if accuracy >= options.accuracy - MARGIN and len(some) < len(questions):
                some = [questions[index] for index in range(len(questions))]
                accuracy = accuracy_on(some)
            logger.info(
                "warm-up step %d: greedy accuracy %.3f on %d held-out questions", step, accuracy, len(some)
            )
            return accuracy >= options.accuracy and len(some) == len(questions)

        trainer.fit(after_step=good_enough)
        trainer.state.write_huggingface(folder / "model", True)
        steps = trainer.state.step
    return WarmUp(folder / "model", accuracy, steps, time.perf_counter() - start)


def held_out_questions(tokenizer: Tokenizer, *, seed: int) -> MapDataset[PromptRow]:
    """Return the validation split of the tiny task, which is in neither training set."""
    # training questions are not wanted here
    few = ["actor_rollout_ref.model.path=unused", "data.task.size=64"]
    config = prepare_config(PPOConfig, few, recipe="tiny/grpo").config
    data = build_prompt_data(config.data, tokenizer, seed)
    assert data.val_dataset is not None, "the recipe has held-out questions"
    return data.val_dataset
