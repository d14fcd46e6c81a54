"""GSM8K: the number after `####`, or (flexible) the last number of the response."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.functions.ground_truth import required

_NUMBER = r"-?\$?\s?-?(?:\d[\d,]*(?:\.\d*)?|\.\d+)"
_MARKED = re.compile(r"####\s*(" + _NUMBER + ")")
_ANY = re.compile(_NUMBER)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score 1.0 if the last answer is the ground truth's number, `format_score` for another number.

    A response without an answer scores 0.0. `method="strict"` wants `#### number`; `"flexible"` takes the
    last number anywhere. Commas, `$` and a trailing dot do not count, and 72 equals 72.0. The ground truth
    may be the number or a worked answer that ends in `#### number`.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: got method={method!r}, wanted strict or flexible")
    truth = str(required(ground_truth)).rpartition("####")[2]
    pattern = {"strict": _MARKED, "flexible": _ANY}[method]
    found = pattern.findall(solution_str)
    if not found:
        return {"score": 0.0, "acc": 0.0}
    if _value(found[-1]) == _value(truth):
        return {"score": 1.0, "acc": 1.0}
    return {"score": format_score, "acc": 0.0}


def _value(text: str) -> Decimal | str:
    bare = text.replace(",", "").replace("$", "").replace(" ", "").strip().rstrip(".")
    try:
        return Decimal(bare)
    except InvalidOperation:
        return bare
