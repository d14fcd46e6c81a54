"""Data of a solution as values: plain ones, whose operators are those of Python, or an error.

The data may have been written to hold up its reader. The time is linear in the length of the text: depth
is bounded, integers are hexadecimal, and sets in which many items share a hash are refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 200
MAX_OF_A_HASH = 256
"""Items of a set that may share a hash, as tuples of -1 and -2 do."""
ERRORS = (ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError, MemoryError)
"""What reading or comparing such data may raise."""


def read(text: str, builders: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return the value of a text; `builders` give the value of each kind of object. Raises ERRORS."""
    return decode(json.loads(text), builders)


def decode(data: Any, builders: Mapping[str, Callable[[Any], Any]], depth: int = 0) -> Any:
    """Return the value of parsed JSON. Raises ERRORS."""
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deep")
    if isinstance(data, list):
        return [decode(item, builders, depth + 1) for item in data]
    if isinstance(data, dict):
        ((kind, content),) = data.items()
        return builders[kind](decode(content, builders, depth + 1))
    return data


def _hashed(items: list[Any]) -> list[Any]:
    """Return the items, of which few may share a hash, or a set of them would take quadratic time."""
    if max(Counter(map(hash, items)).values(), default=0) > MAX_OF_A_HASH:
        raise ValueError("many items share a hash")
    return items


def dict_of(pairs: list[list[Any]]) -> dict[Any, Any]:
    """Return a dict of pairs in two-item lists."""
    _hashed([key for key, _ in pairs])
    return dict(pairs)


PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "tuple": tuple,
    "set": lambda items: set(_hashed(items)),
    "frozenset": lambda items: frozenset(_hashed(items)),
    "dict": dict_of,
}
"""Builders of the values that are written as literals."""
