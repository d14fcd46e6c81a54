"""The arithmetic-chain task: the response must end in `#### n` with n the right answer."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.rewards.functions.ground_truth import required

_ANSWER = re.compile(r"####\s*(-?\d+)\s*$")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """1.0 if the response ends in `#### n` and n is the ground truth, else 0.0; nothing but white space may follow n."""
    truth = int(required(ground_truth))
    found = _ANSWER.search(solution_str)
    score = float(found is not None and int(found[1]) == truth)
    return {"score": score, "acc": score}
