"""Format: does the response look as a regular expression wants it to. A term for compositions."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str,
    **kwargs: Any,
) -> float:
    """1.0 if `pattern` is found in the response (`.` matches line ends too; anchor with ^ and $ for the
    whole), else 0.0.
    """
    return float(re.search(pattern, solution_str, re.DOTALL) is not None)
