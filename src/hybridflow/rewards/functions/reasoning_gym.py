"""reasoning-gym tasks: the task's own scorer decides (the extra `tasks`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from hybridflow.data.answers.stated import last_tagged
from hybridflow.data.json_entry import decode_entry
from hybridflow.errors import RewardError, install_extra

logger = logging.getLogger(__name__)

_UNREADABLE = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, SyntaxError)
"""Errors that the tasks' verifiers raise on odd answers."""

_MARKED = re.compile(r"####(.*?)(?:\n|$)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the task's score of the response's answer, in [0, 1]; "acc" is 1.0 only for a full score.

    An answer that the task's scorer cannot make sense of scores 0.0.

    The answer is the content of the last `<answer>...</answer>`, else the text after the last `####`, else
    the whole response. The task's entry comes from `extra_info["entry"]` (a dict, or its JSON by
    `data.json_entry`), the task's name from the entry or from the data source `reasoning_gym:NAME`. Raises
    RewardError if the entry is missing or reasoning-gym is not installed.
    """
    entry = (extra_info or {}).get("entry")
    if isinstance(entry, str):
        entry = decode_entry(entry)
    if not isinstance(entry, dict):
        raise RewardError(
            f"reasoning_gym: wanted the task's entry in extra_info['entry'], got {type(entry).__name__}; "
            "make the rows with data.task.name=reasoning_gym:NAME"
        )
    name = data_source.partition(":")[2] or entry.get("metadata", {}).get("source_dataset", "")
    answer = extract_answer(solution_str)
    scorer = _scorer(name)
    try:
        score = float(scorer(answer=answer, entry=entry))
    except _UNREADABLE as error:
        logger.debug("reasoning_gym:%s could not verify %r: %s", name, answer[:200], error)
        score = 0.0
    return {"score": score, "acc": float(score >= 1.0)}


def extract_answer(text: str) -> str:
    """Return the answer that a response gives: tagged, else marked by `####`, else all of it."""
    tagged = last_tagged(text, "answer")
    if tagged is not None:
        return tagged.strip()
    if found := _MARKED.findall(text):
        return str(found[-1]).strip()
    return text.strip()


@cache
def _scorer(name: str) -> Callable[..., float]:
    try:
        scorer: Callable[..., float] = _library().get_score_answer_fn(name)
    except ValueError as error:
        raise RewardError(
            f"reasoning-gym has no task {name!r}: the data_source of its rows is reasoning_gym:NAME"
        ) from error
    return scorer


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise RewardError(
            f"reasoning_gym tasks need reasoning-gym, which is not installed: {install_extra('tasks')}"
        ) from error
    return reasoning_gym


def prepare() -> None:
    """Import reasoning-gym before the run, on no sample's clock; RewardError where it is missing."""
    _library()
