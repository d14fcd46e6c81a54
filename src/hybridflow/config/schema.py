"""Declaration of a key: its default, its one-line meaning and its bounds, together in one place."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def key(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    argument: str = "",
    symbol: str = "",
    otherwise: str = "",
) -> Any:
    """Declare a configuration key.

    `minimum`/`maximum` are inclusive bounds, `above` and `below` exclusive ones, checked by the converter on
    numbers. A mutable default (list, dict) is copied for each instance. `default=MISSING` makes the key
    mandatory.

    `symbol` is what equations call the argument of advantage estimators or policy losses that the key sets,
    and `argument` its name where there is no symbol or the key has another name. While the key is null, the
    key `otherwise` of the same block sets the argument.
    """
    metadata = {
        "meaning": meaning,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "argument": argument,
        "symbol": symbol,
        "otherwise": otherwise,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type[Any], **defaults: Any) -> Any:
    """Declare a nested block of keys; `defaults` replace some of the block's own."""
    return field(default_factory=lambda: cls(**defaults))


__all__ = ["MISSING", "group", "key"]
