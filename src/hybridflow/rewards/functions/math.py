"""Mathematics: the boxed answer, compared symbolically by math-verify (the extra `math`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from hybridflow.errors import RewardError, install_extra
from hybridflow.rewards.functions.ground_truth import required

_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_BRACE = re.compile(r"[{}]")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    boxed_only: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    r"""Score 1.0 if the answer in the last `\boxed{...}` of the response equals the ground truth, else 0.0.

    The ground truth is LaTeX, boxed or bare. `boxed_only=False` also accepts an answer that math-verify finds
    without a box. math-verify's own time limit is off: it works by a signal, which only a main thread may
    set, and the worker's deadline bounds the call. Raises RewardError if math-verify is not installed.
    """
    truth = str(required(ground_truth))
    answer = last_boxed(solution_str)
    if answer is None and boxed_only:
        return {"score": 0.0, "acc": 0.0}
    truth = last_boxed(truth) or truth
    if answer is not None and answer.strip() == truth.strip():
        return {"score": 1.0, "acc": 1.0}
    parse, verify = _math_verify()
    wanted = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    given = solution_str
    if answer is not None:
        given = f"\\boxed{{{answer}}}"
    got = parse(given, parsing_timeout=None)
    score = float(bool(wanted and got) and verify(wanted, got, timeout_seconds=None))
    return {"score": score, "acc": score}


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}` of `text`, or None.

    One pass over the text: a policy that only repeats `\boxed{` must not run into the deadline.
    """
    boxes = {mark.end() - 1 for mark in _BOX.finditer(text)}
    open_braces: list[int] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        place = brace.start()
        if brace[0] == "{":
            open_braces.append(place)
        elif open_braces:
            opening = open_braces.pop()
            if opening in boxes and (last is None or opening > last[0]):
                last = (opening, place)
    if last is None:
        return None
    return text[last[0] + 1 : last[1]]


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardError(
            f"the math reward needs math-verify, which is not installed: {install_extra('math')}"
        ) from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    return parse, verify


def prepare() -> None:
    """Import math-verify before the run, on no sample's clock; RewardError where it is missing."""
    _math_verify()
