"""Format: whether a regular expression matches the response. A term for compositions."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, *, pattern: str) -> float:
    """Score 1.0 if `pattern` is found in the response, else 0.0.

    `.` matches line ends too; anchor the pattern with ^ and $ to match the whole response.
    """
    return float(re.search(pattern, solution_str, re.DOTALL) is not None)
