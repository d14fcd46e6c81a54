"""Length: the characters of a response beyond a limit, as a term with a negative weight."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, *, max_chars: int, buffer_chars: int = 0
) -> float:
    """Return the excess in [0, 1]: 0 up to `max_chars`, rising linearly to 1 at `max_chars + buffer_chars`.

    With `buffer_chars` 0 it is a step. It is a penalty: give it a negative weight.
    """
    excess = len(solution_str) - max_chars
    if excess <= 0:
        return 0.0
    return min(1.0, excess / max(buffer_chars, 1))
