"""The arithmetic-chain task: the response must end in `#### n` with n the right answer."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.rewards.result import required

_ANSWER = re.compile(r"####\s*(-?\d{1,1000})\s*$")  # Python refuses to read a number of 5,000 digits
_WORKED = re.compile(r"\s*(-?\d+ [-+] \d+ = -?\d+ \. )+#### -?\d+\s*")


def compute_score(data_source: str, solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Score 1.0 if the response ends in `#### n` and n is the ground truth, else 0.0.

    Nothing but white space may follow n. `format` is 1.0 where the response is steps `a + b = c . ` (at least
    one, right or wrong) and then `#### n`, else 0.0; it does not enter the score.
    """
    truth = int(required(ground_truth))
    found = _ANSWER.search(solution_str)
    score = float(found is not None and int(found[1]) == truth)
    return {"score": score, "acc": score, "format": float(_WORKED.fullmatch(solution_str) is not None)}
