"""DAPO's mathematics: what stands behind the last "Answer:", compared by `data.answers`; 1 or -1."""

from __future__ import annotations

from typing import Any

from hybridflow.data.answers.stated import after_answer
from hybridflow.data.answers.verdict import one_spelling, same_answer
from hybridflow.rewards.result import required

LONGEST = 300
"""Characters at the end of a response in which the answer is looked for."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 if the last answer is the ground truth, else -1.0; `pred` is that answer in one spelling.

    The page on rewards states what is equal. Needs no math-verify. Source: arXiv 2503.14476, section 3.5.
    """
    truth = str(required(ground_truth))
    answer = after_answer(solution_str[-LONGEST:])
    right = float(bool(answer and same_answer(truth, answer)))
    found = one_spelling(answer or "")
    return {"score": 2.0 * right - 1.0, "acc": right, "format": float(answer is not None), "pred": found}
