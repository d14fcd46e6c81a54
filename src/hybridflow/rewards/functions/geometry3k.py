"""Geometry3k: thoughts in `<think>`, then the boxed answer; mostly its value counts, a little its form."""

from __future__ import annotations

from typing import Any

from hybridflow.data.answers.stated import last_boxed
from hybridflow.rewards.functions import math


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, *, format_score: float = 0.1
) -> dict[str, Any]:
    """Return (1 - format_score) · acc + format_score · format, both 1.0 or 0.0.

    `acc` is the score of `math`, and raises what that raises. `format` wants `<think>` first, and a box that
    has an answer behind `</think>`.
    """
    right = math.compute_score(data_source, solution_str, ground_truth)["acc"]
    thoughts, end, rest = solution_str.lstrip().partition("</think>")
    formed = float(thoughts.startswith("<think>") and bool(end) and last_boxed(rest) is not None)
    return {"score": (1.0 - format_score) * right + format_score * formed, "acc": right, "format": formed}


def prepare() -> None:
    """Import math-verify before the run; RewardError where it is missing."""
    math.prepare()
