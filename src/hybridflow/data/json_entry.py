"""A procedural task's entry as JSON text and back, with what JSON lacks: tuples, sets, keys of any type.

    entry ──encode_entry──► text in extra_info ──decode_entry──► an equal entry

Parquet files and a reward's process can hold the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def encode_entry(entry: Mapping[str, Any]) -> str:
    """Return the entry as JSON, from which `decode_entry` gets it back.

    Verifiers compare tuples and look up keys that are no strings, so these have to survive.
    """
    return json.dumps(_pack(dict(entry)))


def decode_entry(text: str) -> dict[str, Any]:
    """Return the entry that `encode_entry` wrote."""
    entry: dict[str, Any] = json.loads(text, object_hook=_unpack)
    return entry


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):  # numpy
        return _pack(value.tolist())
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _pack(item) for key, item in value.items()}
        return {"__items__": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [_pack(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"__set__": sorted((_pack(item) for item in value), key=repr)}
    return str(value)


def _unpack(value: dict[str, Any]) -> Any:
    if value.keys() == {"__items__"}:
        return dict(value["__items__"])
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__set__"}:
        return set(value["__set__"])
    return value
