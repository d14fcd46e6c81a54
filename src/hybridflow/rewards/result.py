"""What a reward function may return, and its one form: (score: float, extras: dict of plain values)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from hybridflow.errors import RewardError

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
WANTED = 'wanted a finite number, or a dict with "score": a finite number'


def normalize_result(result: Any) -> tuple[float, dict[str, Any]]:
    """The score and the extra columns of a function's result.

    Raises RewardError if the result is neither a finite number (int, float, bool, numpy scalar, tensor of one
    element) nor a dict whose "score" is one.
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(
                f'the reward function returned a dict without "score" (keys: {sorted(map(str, result))}); '
                f"{WANTED}"
            )
        extras = {str(name): _plain(value) for name, value in result.items() if name != "score"}
        return _number(result["score"], 'as "score" '), extras
    return _number(result, ""), {}


def _number(value: Any, where: str) -> float:
    if not isinstance(value, (str, bytes)) and hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError, TypeError):  # more than one element: refused below
            value = value.item()  # numpy scalars, and arrays or tensors of one element
    if not isinstance(value, (bool, int, float)):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise RewardError(f"the reward function returned {where}{shown} ({type(value).__name__}); {WANTED}")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:  # also where it is nan
        limit = f" (in float32, at most {FLOAT32_MAX:.4g})" if math.isfinite(number) else ""
        raise RewardError(f"the reward function returned {where}{number}; {WANTED}{limit}")
    return number


def _plain(value: Any) -> Any:
    """The value as something JSON knows; what JSON does not know becomes its text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # numpy scalars and arrays, tensors: known by their method, so that a worker need not import numpy
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return str(value)
