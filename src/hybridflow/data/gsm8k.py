"""The answers of GSM8K: the number after `####`, or (flexible) the last number of a text."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from hybridflow.data.answers.stated import last_match
from hybridflow.data.answers.verdict import same_answer

_CURRENCY = r"(?:\\?[$€£¥₹]\s?)?"
_NUMBER = (
    r"(?:\\[dt]?frac\{\d+\}\{\d+\}"
    r"|(?:\d(?:[\d,]*\d)?(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?![\w.])|\s?/\s?\d+|\s\d+/\d+)?)(?:\s?\\?%)?"
)
"""A number; also 3/4, 3 1/2, 1.5e3, a fraction of LaTeX, and percent."""
_PATTERNS = {
    "strict": re.compile(
        r"####(?:[*_`({\s]|\\?[$€£¥₹]|\\[(\[]|\\(?:boxed|text)\s*\{){0,30}"
        rf"(?P<number>[-−–+]?\s?{_CURRENCY}[-−–]?{_NUMBER})"
    ),
    "flexible": re.compile(
        rf"(?P<number>(?:(?<![\w)\]])(?<![\d)\]]\s)[-−–]\s?)?{_CURRENCY}(?:(?<!\w)[-−–])?{_NUMBER})"
    ),
}
_GOES_ON = re.compile(
    r"\.?\d|[ \t]*[*×·^:/+÷][ \t]*[\w(\\]|[ \t]*[-−–][ \t]*\d|[ \t]*(?:,|\b(?:or|and|to)\b)[ \t]*\\?[$€£]?\d"
)
"""What makes the text behind a number a part of it: 3:30, 2*36, 5-6, and 5 or 6 are no numbers."""
_GROUPS = re.compile(r"\d{1,3}(?:,\d{2,3})*,\d{3}")
_WITH_COMMAS = re.compile(r"\d+,[\d,]*")
_LEFT_OUT = re.compile(r"[\s,$€£¥₹+]|\\(?=[$%])")


def is_answer(text: str, ground_truth: Any, method: Literal["strict", "flexible"]) -> bool | None:
    """Whether the last answer of a text is the ground truth's number; None where it has no answer.

    `method="strict"` wants `#### number`; `"flexible"` takes the last number anywhere. Commas between
    thousands, currency and a dot at the end do not count, and 72 equals 72.0 and 144/2. The ground truth may
    be the number or a worked answer that ends in `#### number`.
    """
    found = last_match(_PATTERNS[method], text)
    if found is None:
        return None
    number = found["number"]
    if "," in number and not all(map(_GROUPS.fullmatch, _WITH_COMMAS.findall(number))):
        if method == "strict":
            return False
        number = number.rpartition(",")[2]
    if method == "strict" and _GOES_ON.match(text, found.end()):
        return False
    truth = str(ground_truth).rpartition("####")[2].strip().rstrip(".")
    bare = [_LEFT_OUT.sub("", text.replace("−", "-").replace("–", "-")) for text in (truth, number)]
    try:
        values = [Decimal(text) for text in bare]
    except InvalidOperation:
        return bool(same_answer(truth, number))
    if values[0] == values[1] or "." not in bare[0] + bare[1]:
        return values[0] == values[1]
    return bool(same_answer(bare[0], bare[1]))
