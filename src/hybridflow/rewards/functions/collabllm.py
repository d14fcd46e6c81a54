"""CollabLLM's reward of an answer: what its continuations with a simulated user are worth on average.

score = Σ_metric weight · mean over continuations of the metric (Wu et al. 2025, arXiv 2502.00640, section 3)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hybridflow.errors import ConfigError, RewardError
from hybridflow.tools.http_post import ask_model

JUDGED = {
    "accuracy": """\
Question: {question}
Right answer: {ground_truth}

{conversation}

Is what the assistant gives in the end to this question right, by the right answer? 1 for yes, 0 for no.""",
    "interactivity": """\
{conversation}

How well does the assistant work with the user? Judge three things, each from 0 to 1: it understands what is
wanted and is clear; it asks precise questions where something is missing; its suggestions help. Give their
mean.""",
}
"""What a judge is asked of a conversation, by metric."""
FORM = '\n\nThink briefly, then end with a JSON object: {"%s": NUMBER}'
TOKEN_AMOUNT = "token_amount"


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    metric_weights: Mapping[str, float],
    llm_judge_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score the continuations in `extra_info["conversations"]`, or -1.0 where there are none.

    `metric_weights` has the weights of accuracy and interactivity, from 0 to 1 by a judge whose model is
    `llm_judge_kwargs.model`, and of token_amount, the words of a continuation. Raises ConfigError for
    another metric, and RewardError where a judge's answer has no such number.
    """
    known = (*JUDGED, TOKEN_AMOUNT)
    if unknown := set(metric_weights) - set(known):
        raise ConfigError(f"metric_weights: got {sorted(unknown)}, wanted some of {', '.join(known)}")
    conversations = extra_info.get("conversations") or ()
    if not conversations:
        return {"score": -1.0, **dict.fromkeys(metric_weights, 0.0)}
    question = (extra_info.get("interaction_kwargs") or {}).get("single_turn_prompt", "")

    async def value(metric: str, messages: Sequence[Mapping[str, Any]]) -> float:
        if metric == TOKEN_AMOUNT:
            new = messages[extra_info["num_prompt_messages"] :]
            return float(sum(len(message["content"].split()) for message in new))
        asked = JUDGED[metric].format(
            question=question, ground_truth=ground_truth, conversation=as_text(messages)
        )
        content = asked + FORM % metric
        answer = await ask_model([{"role": "user", "content": content}], **(llm_judge_kwargs or {}))
        return number_in(answer, metric)

    values = {
        metric: fmean(await asyncio.gather(*(value(metric, each) for each in conversations)))
        for metric in metric_weights
    }
    return {"score": sum(metric_weights[metric] * values[metric] for metric in values), **values}


def number_in(answer: str, metric: str) -> float:
    """Return the number from 0 to 1 in the last JSON object of a judge's answer; RewardError without one."""
    for text in reversed(re.findall(r"\{[^{}]*\}", answer)):
        try:
            number = float(json.loads(text)[metric])
        except (ValueError, KeyError, TypeError):
            continue
        if 0.0 <= number <= 1.0:
            return number
    raise RewardError(f"the judge gave no {metric} from 0 to 1: {answer[-200:]!r}")


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation for a reader, without the system's message."""
    spoken = [message for message in messages if message["role"] != "system"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in spoken)
