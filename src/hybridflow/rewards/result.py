"""The request to a reward function, its outcome, which is plain data and can cross a process boundary, and
the results of reward functions in one form: (score: float, extras: dict of plain values).

Plain are None, bool, int, float, str, and lists and dicts of them: what JSON can carry from a worker.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridflow.config.own_code import MESSAGES, TOKENS
from hybridflow.errors import RewardError

PROMPT = "raw_prompt"
"""Name under which a reward function may ask for the row's prompt, a text or messages."""
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
WANTED = 'wanted a finite number, or a dict with "score": a finite number'
MAX_DEPTH = 20
"""Levels of lists and dicts that a value of the result may have."""

_INT_LIMIT = 2**1023
"""Integers from here on are beyond float64, in which columns of numbers are kept."""


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
class ScoringOutcome:
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
        """Submit one more request."""

    def outcomes(self) -> list[ScoringOutcome]:
        """Wait for all outcomes; return them in the order in which the requests came."""

    def close(self) -> None:
        """End running requests, unless all outcomes are there."""


class Scorer(Protocol):
    """Answers requests; every failure of the function becomes an Outcome, none is raised."""

    def open(self) -> OpenScoring: ...

    def close(self) -> None: ...


def normalize_result(result: Any) -> tuple[float, dict[str, Any]]:
    """The score and the extra columns of a function's result.

    The score is a number that float32 can hold: int, float, bool, numpy scalar, array or tensor of one
    element. Arrays, tensors and numpy scalars among the other values become lists and numbers. Raises
    RewardError if the score is missing, not finite or beyond float32, or a value is none that JSON can carry;
    it names the key.
    """
    if not isinstance(result, Mapping):
        return _number(result, ""), {}
    if "score" not in result:
        raise RewardError(
            f'the reward function returned a dict without "score" (keys: {sorted(map(str, result))}); '
            f"{WANTED}"
        )
    extras = {str(name): _plain(value, str(name), 0) for name, value in result.items() if name != "score"}
    return _number(result["score"], 'as "score" '), extras


def token_scores_of(result: Any, num_tokens: int) -> tuple[float, ...]:
    """Return the scores of single tokens, where the function's result, or its `score`, is a list of them.

    Returns an empty tuple where there is one score. Raises RewardError if there is not one for each token
    (`num_tokens` 0: how many is not known), or one is no number that float32 can hold.
    """
    if isinstance(result, Mapping):
        result = result.get("score")
    if hasattr(result, "tolist"):
        result = result.tolist()
        if isinstance(result, list) and len(result) == 1:
            return ()  # an array of one number is a number
    if not isinstance(result, (list, tuple)):
        return ()
    if num_tokens and len(result) != num_tokens:
        raise RewardError(
            f"the reward function returned {len(result)} scores of tokens; wanted {num_tokens}, one for each "
            "of response_ids, the tokens that the policy has sampled"
        )
    return tuple(_number(value, f"as score of token {place} ") for place, value in enumerate(result))


def _number(value: Any, where: str) -> float:
    if not isinstance(value, (str, bytes)) and hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError, TypeError):  # more than one element: refused below
            value = value.item()  # numpy scalars, and arrays or tensors of one element
    if not isinstance(value, (bool, int, float)):
        raise RewardError(
            f"the reward function returned {where}{_shown(value)} ({type(value).__name__}); {WANTED}"
        )
    limit = f"{WANTED} (in float32, at most {FLOAT32_MAX:.4g})"
    try:
        number = float(value)
    except OverflowError as error:
        raise RewardError(
            f"the reward function returned {where}an integer beyond float64; {limit}"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"the reward function returned {where}{number}; {WANTED}")
    if abs(number) > FLOAT32_MAX:
        raise RewardError(f"the reward function returned {where}{number}; {limit}")
    return number


def _plain(value: Any, key: str, depth: int) -> Any:
    """The value of `key` as exactly a type that JSON knows: a subclass of float becomes a float."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        if abs(number) >= _INT_LIMIT:
            raise _refusal(key, "an integer beyond float64")
        return number
    if depth >= MAX_DEPTH:
        raise _refusal(key, f"lists or dicts more than {MAX_DEPTH} levels deep")
    # numpy scalars and arrays, tensors: known by their method, so that a worker need not import numpy
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), key, depth + 1)
    if isinstance(value, (list, tuple)):
        return [_plain(item, key, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{key}.{name}", depth + 1) for name, item in value.items()}
    raise _refusal(key, f"{_shown(value)} ({type(value).__name__})")


def _refusal(key: str, got: str) -> RewardError:
    return RewardError(
        f"the reward function returned under {key!r} {got}; wanted a number, a text, true, false, None, an "
        "array, or a list or dict of these: convert it, for example by str(), or leave it out"
    )


def _shown(value: Any) -> str:
    """The value's repr, shortened."""
    try:
        text = repr(value)
    except Exception:  # a user's class
        return "an object"
    if len(text) <= 80:
        return text
    return text[:77] + "..."


def required(ground_truth: Any) -> Any:
    """Return the ground truth; RewardError where the row has none, as a score of 0 would hide it."""
    if ground_truth is None:
        raise RewardError(
            "the row has no ground truth: give the data a column reward_model with ground_truth in it, "
            "or choose a reward that needs none, for example your own by "
            "reward.custom_reward_function.path=FILE.py:NAME"
        )
    return ground_truth
