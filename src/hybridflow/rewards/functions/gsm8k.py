"""GSM8K: the number after `####`, or (flexible) the last number of the response."""

from __future__ import annotations

from typing import Any, Literal

from hybridflow.data.gsm8k import is_answer
from hybridflow.errors import ConfigError
from hybridflow.rewards.result import required


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score 1.0 if the last answer is the ground truth's number, `format_score` for another number.

    A response without an answer scores 0.0. `data.gsm8k.is_answer` says what an answer is by each `method`.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: got method={method!r}, wanted strict or flexible")
    is_right = is_answer(solution_str, required(ground_truth), method)
    if is_right is None:
        return {"score": 0.0, "acc": 0.0}
    if is_right:
        return {"score": 1.0, "acc": 1.0}
    return {"score": format_score, "acc": 0.0}
