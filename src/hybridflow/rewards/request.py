"""The request to a reward function and its outcome: plain data, which can cross a process boundary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridflow.config.own_code import MESSAGES, TOKENS

PROMPT = "raw_prompt"
"""Name under which a reward function may ask for the row's prompt, a text or messages."""


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score; `ground_truth` and `extra_info` are the row's, of whatever type they are."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    response_ids: tuple[int, ...] = ()
    """Ids of the tokens that the policy sampled, in the order of its calls; empty where not known."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation with the response, for reward models, judges and functions that name it."""
    prompt: Any = None
    """The row's prompt, a text or messages, where it is known."""

    def row(self) -> dict[str, Any]:
        """Return all that a reward function may be given, by the names in `function.ROW`."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
            TOKENS: list(self.response_ids),
            MESSAGES: list(self.messages),
            PROMPT: self.prompt,
        }


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request: a score, or the kind of error with its text."""

    score: float = 0.0
    extras: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Empty where there is a score; else the exception's type name, "timeout" or "died"."""
    detail: str = ""
    """The traceback, or a sentence where there is none."""
    seconds: float = 0.0
    tries: int = 1
    """Times that the function was called for it; 0 where a kept outcome was taken."""
    token_scores: tuple[float, ...] = ()
    """A score for each of `response_ids`, which sum up to `score`; empty where there is one score only."""
    ended: float = field(default_factory=time.time, compare=False)
    """When it was there, in seconds since the epoch."""


class OpenScoring(Protocol):
    """Requests that are scored while more of them come."""

    def add(self, request: ScoreRequest) -> None:
        """Have one more request scored."""

    def outcomes(self) -> list[Outcome]:
        """Wait for all outcomes; return them in the order in which the requests came."""

    def close(self) -> None:
        """End what is under way, unless all outcomes are there."""


class Scorer(Protocol):
    """Answers requests; every failure of the function becomes an Outcome, none is raised."""

    def open(self) -> OpenScoring: ...

    def close(self) -> None: ...
