r"""Mathematics: the boxed answer, compared by `data.answers`; what that does not read goes to math-verify.

math-verify (the extra `math`) reads integrals, limits and sums of matrices, for example. It evaluates what it
reads, so it is given short texts without large powers, and a number of calls: nothing hangs, and a verdict
does not depend on a clock.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

from hybridflow.data.answers.stated import last_boxed, unboxed_answer
from hybridflow.data.answers.verdict import same_answer
from hybridflow.errors import RewardError, install_extra
from hybridflow.rewards.result import required

LONGEST = 400
"""Characters of an answer that math-verify is given."""
MAX_POWERS = 6
MAX_CALLS = 4_000_000
"""Calls and returns of functions after which math-verify is stopped: a second or two. An integral takes one
million.
"""

_HEAVY = re.compile(
    r"\d{5}|!|\\[dt]?binom|\\choose|\\[lc]?dots|\^\s*\{?\s*-?\s*\d{4}|\^\s*\{[^{}]*[\^{]|\^\s*\w\s*\^"
    r"|[)}\]]\s*\^\s*\{?\s*-?\s*\d\d"
)
"""Numbers of five digits, factorials, powers of powers: what could become too large to compute."""
_WITHOUT_VALUE = (ArithmeticError, TypeError, ValueError, NotImplementedError, RecursionError)
"""Errors of sympy for a number that it cannot evaluate or compare, beside mpmath's `NoConvergence`."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, *, boxed_only: bool = True
) -> dict[str, Any]:
    r"""Score 1.0 if the answer in the last `\boxed{...}` of the response equals the ground truth, else 0.0.

    The ground truth is LaTeX, boxed or bare. `boxed_only=False` also accepts an answer without a box: what
    stands behind "answer is", else the last formula or number. The page on rewards states what is equal.
    Raises RewardError if math-verify is not installed.
    """
    truth = str(required(ground_truth))
    answer = last_boxed(solution_str)
    if answer is None and not boxed_only:
        answer = unboxed_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    is_right = same_answer(truth, answer)
    if is_right is None:
        is_right = _same_by_math_verify(last_boxed(truth) or truth, answer)
    return {"score": float(is_right), "acc": float(is_right)}


class _Spent(BaseException):
    """The calls are spent. It is no Exception, so that libraries which catch those let it through."""


def _same_by_math_verify(truth: str, answer: str) -> bool:
    """Whether math-verify finds two answers equal, within the bounds on what it is given and may do."""
    for text in (truth, answer):
        if len(text) > LONGEST or text.count("^") > MAX_POWERS or _HEAVY.search(text):
            return False
    parse, verify = _math_verify()
    left = MAX_CALLS

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Spent

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        wanted, got = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
        is_right = bool(wanted and got) and verify(wanted, got, timeout_seconds=None)
        return is_right and _close(wanted[0], got[0])
    except _Spent:  # math-verify lets through no other error
        return False
    finally:
        sys.setprofile(before)


def _close(wanted: Any, got: Any) -> bool:
    """Whether two numbers of sympy differ by little of their worth; math-verify compares digits behind the
    point. True for what is no number, False for a number that has no value.
    """
    from mpmath.libmp import NoConvergence

    if not (getattr(wanted, "is_number", False) and getattr(got, "is_number", False)):
        return True
    try:
        values = [abs(number.evalf(30)) for number in (wanted, got)]
        return bool(abs((wanted - got).evalf(30)) <= max(values) * 1e-9)
    except (NoConvergence, *_WITHOUT_VALUE):
        return False


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
    pair = [parse(text, parsing_timeout=None) for text in (r"$\int_0^1 x^2 dx$", r"$\frac{1}{3}$")]
    verify(*pair, timeout_seconds=None)  # sympy imports parts of itself now, which counts for no answer
    return parse, verify


def prepare() -> None:
    """Import math-verify before the run, on no sample's clock; RewardError where it is missing."""
    _math_verify()
