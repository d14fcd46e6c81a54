"""The answers of a reward worker to the trainer, as JSON, which runs no code when it is read.

{"state": "ready", "is_async": false, "process_id": 4711}        the reward function is loaded
{"state": "failed", "error": "ConfigError", "detail": "..."}     it could not be loaded
{"state": "taken", "ticket": 7}                                  request 7 is being scored now
{"state": "scored", "ticket": 7, "score": 1.0, ...}              its Outcome
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hybridflow.rewards.request import Outcome
from hybridflow.rewards.result import FLOAT32_MAX

MAX_ANSWER = 64 << 20
"""Longest answer in bytes; extra values beyond it are refused."""


def encode_outcome(ticket: int, outcome: Outcome) -> bytes:
    """The outcome of request `ticket` as JSON; extra values over MAX_ANSWER become that request's error."""
    text = _encode(ticket, outcome)
    if len(text) <= MAX_ANSWER:
        return text
    sizes = {name: len(json.dumps(value)) for name, value in outcome.extras.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="score")
    detail = (
        f"the reward function returned {len(text):,} bytes of values, most of them under {largest!r}; wanted "
        f"at most {MAX_ANSWER:,}: return less"
    )
    return _encode(ticket, Outcome(error="RewardError", detail=detail, seconds=outcome.seconds))


def _encode(ticket: int, outcome: Outcome) -> bytes:
    return encode({"state": "scored", "ticket": ticket, **asdict(outcome)})


def encode(message: dict[str, Any]) -> bytes:
    """A message as ASCII JSON."""
    return json.dumps(message).encode("ascii")


def decode(payload: bytes) -> dict[str, Any]:
    """A message as a dict. Raises ValueError if it is no JSON object."""
    try:
        message = json.loads(payload)
    except RecursionError as error:
        raise ValueError("a message nests too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"got {type(message).__name__}, wanted an object")
    return message


def outcome_of(message: dict[str, Any]) -> Outcome:
    """The Outcome in a "scored" message.

    Raises ValueError, KeyError or TypeError where a field is missing, of another type, or a number that no
    score of ours is.
    """
    score = message["score"]
    if not abs(score) <= FLOAT32_MAX:  # also where it is nan
        raise ValueError(f"a scored message has the score {score}")
    outcome = Outcome(
        score=float(score),
        extras=message["extras"],
        error=message["error"],
        detail=message["detail"],
        seconds=float(message["seconds"]),
    )
    texts = (outcome.error, outcome.detail)
    if not isinstance(outcome.extras, dict) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a scored message has a field of another type")
    return outcome
