"""Search-R1: exact match of the text in the last `<answer>`, as questions of open domains are scored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybridflow.data.answers.stated import last_tagged, plain_words
from hybridflow.rewards.result import required

_ARTICLE = re.compile(r"\b(a|an|the)\b")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, *, format_score: float = 0.0
) -> dict[str, Any]:
    """Score 1.0 if the last answer is one of the right ones, `format_score` for another, 0.0 without one.

    Letter case, punctuation, articles and runs of white space do not count; a number keeps its sign and its
    point. The ground truth is a text, a list of texts, or an object with them under `target`. Source: arXiv
    2503.09516, section 3.4.
    """
    answer = last_tagged(solution_str, "answer")
    truths = required(ground_truth)
    if isinstance(truths, Mapping):
        truths = required(truths.get("target"))
    if isinstance(truths, str):
        truths = [truths]
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    if _plain(answer) in {_plain(str(truth)) for truth in truths}:
        return {"score": 1.0, "acc": 1.0}
    return {"score": format_score, "acc": 0.0}


def _plain(text: str) -> str:
    words = plain_words(text)
    return " ".join(_ARTICLE.sub(" ", words).split()) or words  # the letter A is an answer, too
