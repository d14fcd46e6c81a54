"""Held-out accuracy of a policy on the tiny task, greedy or sampled, with the texts for the reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.agent.single_turn import build_requests
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.rewards.functions.arithmetic_chain import compute_score
from hybridflow.rollout.base import SamplingParams
from hybridflow.workers import RolloutGroup

MAX_TOKENS = 48
"""Longest response, as in the recipes of the tiny task."""


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
