"""Exact match: the response is the ground truth, letter for letter or after normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.data.answers.stated import plain_words
from hybridflow.rewards.result import required


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, *, strip: bool = True, normalize: bool = False
) -> dict[str, Any]:
    """Score 1.0 if the response equals the ground truth (any one of them, if it is a list), else 0.0.

    `strip` ignores white space around both; `normalize` also ignores letter case, runs of white space, and
    punctuation but for the sign and the point of a number.
    """
    required(ground_truth)
    several = not isinstance(ground_truth, str) and (
        isinstance(ground_truth, Sequence) or hasattr(ground_truth, "tolist")
    )
    truths = ground_truth
    if not several:
        truths = [ground_truth]
    got = _clean(solution_str, strip, normalize)
    score = float(any(got == _clean(str(truth), strip, normalize) for truth in truths))
    return {"score": score, "acc": score}


def _clean(text: str, strip: bool, normalize: bool) -> str:
    if normalize:
        return plain_words(text)
    if strip:
        return text.strip()
    return text
