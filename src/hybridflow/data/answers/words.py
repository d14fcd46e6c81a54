"""Answers in words, without what does not count: letter case, punctuation and runs of white space.

Numbers keep their sign and their decimal point: -5 is not 5, and 3.14 is not 314.
"""

from __future__ import annotations

import re
import string

_POINT = re.compile(r"(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)")
_SIGN = re.compile(r"(?<![^\s(\[$€£])[-−](?=[$€£]?\.?\d)")
_KEPT = {0xE000: ".", 0xE001: "-"}
"""Characters of private use, which stand for points and signs of numbers while punctuation goes."""
_RANGES = ((0x2010, 0x205E), (0x3001, 0x3003), (0x3008, 0x3011), (0x3014, 0x301F), (0xFF01, 0xFF0F))
_PUNCTUATION = dict.fromkeys(
    [ord(char) for char in string.punctuation + "¡§«¶·»¿−：；＜＝＞？＠［＼］＾＿｀｛｜｝～｡｢｣､･"]
    + [code for first, last in _RANGES for code in range(first, last + 1)]
)


def plain_words(text: str) -> str:
    """Return a text in lower case, with single spaces and without punctuation that is no part of a number."""
    marked = _SIGN.sub("\ue001", _POINT.sub("\ue000", text.lower()))
    return " ".join(marked.translate(_PUNCTUATION).translate(_KEPT).split())
