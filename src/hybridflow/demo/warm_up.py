"""The warm-up of the tiny task: a new model reads worked answers until it has some questions right.

model folder ──SFT, looking at held-out accuracy now and then──► warm model folder

`evaluate` takes the held-out accuracy of a policy on the task, greedy or sampled, with texts for the reader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.agent.single_turn import build_requests
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.data.build import build_prompt_data
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.rewards.functions.arithmetic_chain import compute_score
from hybridflow.rollout.base import SamplingParams
from hybridflow.trainer.sft.build import build as build_sft
from hybridflow.workers import RolloutGroup

logger = logging.getLogger(__name__)
MAX_TOKENS = 48
"""Longest response, as in the recipes of the tiny task."""
FIRST_LOOK = 256
"""Held-out questions that are tried first; all of them are, once these come near the mark."""
MARGIN = 0.12
"""How near: four standard errors of the accuracy on `FIRST_LOOK` questions."""


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
    """Steps between two looks at that accuracy: it climbs steeply once it climbs."""
    first_check: int = 60
    """No look before this step: no seed is near the mark by then."""
    max_steps: int | None = None
    """Steps at which it ends in any case; None: the recipe's."""


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
