"""The answers of GSM8K: the number after `####`, or (flexible) the last number of a text."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_NUMBER = r"-?\$?\s?-?(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
_PATTERNS = {"strict": re.compile(r"####\s*(" + _NUMBER + ")"), "flexible": re.compile(_NUMBER)}


def is_answer(text: str, ground_truth: Any, method: Literal["strict", "flexible"]) -> bool | None:
    """Whether the last answer of a text is the ground truth's number; None where it has no answer.

    `method="strict"` wants `#### number`; `"flexible"` takes the last number anywhere. Commas, `$` and a
    trailing dot do not count, and 72 equals 72.0. The ground truth may be the number or a worked answer that
    ends in `#### number`.
    """
    found = _PATTERNS[method].findall(text)
    if not found:
        return None
    return _value(found[-1]) == _value(str(ground_truth).rpartition("####")[2])


def _value(text: str) -> Decimal | str:
    bare = text.replace(",", "").replace("$", "").replace(" ", "").strip().rstrip(".")
    try:
        return Decimal(bare)
    except InvalidOperation:
        return bare
