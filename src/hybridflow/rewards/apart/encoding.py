"""Loads a solution and encodes its values as JSON; a value that JSON has no form for is an object with one
key.

    (1, {2: "a"})  ──►  {"tuple": [1, {"dict": [[2, "a"]]}]}

This runs beside the solution, so what comes out is the solution's word.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

SIMPLE: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
RAW_INTEGERS = 1 << 53


def load(code: str, imports: list[str]) -> dict[str, Any]:
    """Run a solution and return its names; what the tests import is added where it has no such name."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    names = module.__dict__
    exec(compile(code, "solution.py", "exec", dont_inherit=True), names)
    imported: dict[str, Any] = {}
    for statement in imports:
        with contextlib.suppress(Exception):
            exec(statement, imported)
    for name, value in imported.items():
        names.setdefault(name, value)
    return names


def encode(value: Any, of_object: Callable[[Any], Any]) -> Any:
    """Return the data of a value; `of_object` gives that of what is no data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        if -RAW_INTEGERS < value < RAW_INTEGERS:
            return value
        return {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is list:
        return [encode(item, of_object) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encode(item, of_object) for item in value]}
    if kind is dict:
        return {"dict": _pairs(value, of_object)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        return {"numpy": [str(value.dtype), encode(value.tolist(), of_object)]}
    if kind.__module__ in ("decimal", "fractions", "datetime", "collections", "builtins"):
        return _of_library(value, kind, of_object)
    return _of_base(value, kind, of_object)


def _pairs(value: Any, of_object: Callable[[Any], Any]) -> list[Any]:
    return [[encode(key, of_object), encode(item, of_object)] for key, item in dict.items(value)]


def _of_library(value: Any, kind: type, of_object: Callable[[Any], Any]) -> Any:
    name = kind.__name__
    if name == "Decimal":
        return {name: str(value)}
    if name == "Fraction":
        return {name: [encode(value.numerator, of_object), encode(value.denominator, of_object)]}
    if name in ("date", "time", "datetime"):
        return {name: value.isoformat()}
    if name == "timedelta":
        return {name: [value.days, value.seconds, value.microseconds]}
    if name in ("Counter", "OrderedDict", "defaultdict"):
        return {name: _pairs(value, of_object)}
    if name == "deque":
        return {name: [[encode(item, of_object) for item in value], value.maxlen]}
    if name == "range":
        return {name: [encode(each, of_object) for each in (value.start, value.stop, value.step)]}
    return of_object(value)


def _of_base(value: Any, kind: type, of_object: Callable[[Any], Any]) -> Any:
    """Return what equals an instance of a class that extends a built-in type."""
    for base in SIMPLE:
        if isinstance(value, base):
            return encode(base(*base.__getnewargs__(value)), of_object)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        items = [encode(item, of_object) for item in value]
        return {"namedtuple": [kind.__name__, list(kind._fields), items]}
    for kinds in (list, tuple, set, frozenset):
        if isinstance(value, kinds):
            return encode(kinds(value), of_object)
    if isinstance(value, dict):
        return {"dict": _pairs(value, of_object)}
    return of_object(value)
