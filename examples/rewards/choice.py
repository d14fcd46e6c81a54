"""Reward of a question with lettered choices: 1 if the last <answer>…</answer> has the right letter."""

from __future__ import annotations

import re
from typing import Any

_ANSWER = re.compile(r"<answer>\s*([A-Z])\b.*?</answer>", re.DOTALL)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Score one response."""
    found = _ANSWER.findall(solution_str)
    return float(bool(found) and found[-1] == ground_truth)
