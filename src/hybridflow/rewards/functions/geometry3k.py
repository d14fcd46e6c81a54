"""Geometry3k: thoughts in `<think>`, then the boxed answer; mostly its value counts, a little its form."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.rewards.functions import math

_FORM = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.1,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return (1 - format_score) · acc + format_score · format, both 1.0 or 0.0.

    `acc` is the score of `math`, and raises what that raises.
    """
    right = math.compute_score(data_source, solution_str, ground_truth)["acc"]
    formed = float(_FORM.fullmatch(solution_str) is not None)
    return {"score": (1.0 - format_score) * right + format_score * formed, "acc": right, "format": formed}


def prepare() -> None:
    """Import math-verify before the run; RewardError where it is missing."""
    math.prepare()
