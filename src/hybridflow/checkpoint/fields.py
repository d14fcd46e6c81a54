"""Checks of values that were read from a checkpoint's JSON files, which anybody may have written.

Each function returns the value with its type, or raises a ValueError that names the field and the value.
"""

from __future__ import annotations

from typing import Any


def as_dict(value: Any, name: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, and an object is wanted")
    return value


def as_list(value: Any, name: str) -> list[Any]:
    """Return a JSON array."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r:.80}, and a list is wanted")
    return value


def as_count(value: Any, name: str) -> int:
    """Return an integer that is not negative; `true` is no integer."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.80}, and an integer of 0 or more is wanted")
    return value


def as_counts(value: Any, name: str) -> tuple[int, ...]:
    """Return a list of integers that are not negative."""
    return tuple(as_count(each, name) for each in as_list(value, name))
