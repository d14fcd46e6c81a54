"""What is asked of a reward function and what came of it: plain data, so that it can cross a process
boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score; `extra_info` is the row's, `ground_truth` whatever its
    `reward_model.ground_truth` held.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of one request: a score, or the kind of error with its text."""

    score: float = 0.0
    extras: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # "" for a score; else the exception's type name, "timeout" or "died"
    detail: str = ""  # the traceback, or a sentence where there is none
    seconds: float = 0.0


class Scorer(Protocol):
    """Answers requests in their order; every failure of the function becomes an Outcome, none is raised."""

    def score(self, requests: list[ScoreRequest]) -> list[Outcome]: ...

    def close(self) -> None: ...
