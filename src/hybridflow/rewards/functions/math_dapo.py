"""DAPO's mathematics: the text after the last "Answer:", compared as text; 1 for right and -1 for wrong."""

from __future__ import annotations

import re
from typing import Any

from hybridflow.rewards.functions.ground_truth import required

LONGEST = 300
"""Characters at the end of a response in which the answer is looked for."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNWRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mbox|overline|boxed)\{([^{}]*)\}")
_LEFT_OUT = re.compile(
    r"\\[;!, ]|\{,\}|\\ldots|\\dots|\^\{?\\circ\}?|\\left|\\right|\\\$|[\"$\s]"
    r"|\ban? |\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents"
    r"|degrees|cm|gm|pounds|meters|meals|edges|students|multiples)\b"
)
_SHORT_FRACTION = re.compile(r"\\[dt]?frac([^{\s])([^{\s])")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\[\s])")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score 1.0 if the last answer is the ground truth, else -1.0; `pred` is the answer that was compared.

    Both are reduced to their bare form first, without units, spaces and LaTeX that changes no value. Source:
    arXiv 2503.14476, section 3.5, and for the bare form arXiv 2206.14858, appendix D.1.
    """
    truth = bare(str(required(ground_truth)))
    answers = _ANSWER.findall(solution_str[-LONGEST:])
    found = ""
    if answers:
        found = bare(answers[-1])
    right = float(bool(found) and found == truth)
    return {"score": 2.0 * right - 1.0, "acc": right, "format": float(bool(answers)), "pred": found}


def bare(answer: str) -> str:
    r"""Return the bare form of an answer: "$x = \frac12$." and "\frac{1}{2}" are the same."""
    text = answer.rpartition("=")[2]
    previous = ""
    while text != previous:  # boxes and texts may be nested
        previous = text
        text = _UNWRAPPED.sub(r"\1", text)
    text = _LEFT_OUT.sub("", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text).strip().rstrip(".")
    if text.replace(",", "").lstrip("-").isdigit():
        text = text.replace(",", "")
    return text
