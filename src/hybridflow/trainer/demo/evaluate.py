"""Held-out accuracy of a policy on the demo's task, greedy or sampled, with the texts for the reader."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.agent import build_requests
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.rewards.functions.arithmetic_chain import compute_score
from hybridflow.rollout.base import RolloutEngine, SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """Share of right answers, and each response with its question, truth and score."""

    accuracy: float
    samples: list[dict[str, object]]


def evaluate(
    engine: RolloutEngine, tokenizer: Tokenizer, questions: MapDataset[PromptRow], *, max_tokens: int, greedy: bool, seed: int
) -> Evaluation:
    """One response to each question under the weights as they are; sampling is at temperature 1."""
    prompts = [questions[index] for index in range(len(questions))]
    sampling = SamplingParams(max_tokens=max_tokens, greedy=greedy)
    batch = build_requests(prompts, sampling, n=1, seed=seed, purpose="demo_evaluation", step=0)
    engine.wake_up()
    outputs = {output.request_id: output for output in engine.generate(batch.requests)}
    engine.sleep()
    texts = tokenizer.batch_decode([outputs[request.request_id].token_ids for request in batch.requests], skip_special_tokens=True)
    samples: list[dict[str, object]] = []
    right = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        truth = prompt.row["reward_model"]["ground_truth"]
        result = compute_score("arithmetic_chain", text, truth)
        score = float(result["score"] if isinstance(result, dict) else result)
        right += score
        samples.append({"question": prompt.row["prompt"][-1]["content"], "response": text, "ground_truth": truth, "score": score})
    return Evaluation(right / len(prompts), samples)
