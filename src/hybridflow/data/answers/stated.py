r"""Where a text states its answer: in `\boxed{...}`, after "Answer:", in a tag, or in its last formula.

Every search passes over the text once or a few times, so that a policy that only repeats an opening mark
does not run into a deadline.

Answers in words are compared without what does not count: letter case, punctuation and runs of white space.

Numbers keep their sign and their decimal point: -5 is not 5, and 3.14 is not 314.
"""

from __future__ import annotations

import re
import string
from collections import deque
from typing import NamedTuple

_MARK = re.compile(r"(?<!\\)\\+(?:boxed|fbox)(?![A-Za-z])|\\[\\{}]|[{}]")
r"""Boxes and braces. `\{` and `\}` are printed braces, which open and close no group."""
_BARE_BOX = re.compile(r"(\d+(?:[.,]\d+)*|[A-Za-z]|\\[A-Za-z]+)")
r"""What `\boxed` frames without braces: a number, a letter or a command."""
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(
    r"(?:[\s$~]|\\[][(),;: ]|\\q?quad)*"
    r"(?:,|;|(?:,\s*)?(?:\band\b|\bor\b|\\(?:text|mbox|textrm)\{\s*,?\s*(?:and|or)\s*\}))"
    r"(?:[\s$~]|\\[][(),;: ]|\\q?quad)*(?:[A-Za-z](?:_\{?\w{1,9}\}?)?\s*=\s*)?"
)
"""What may stand between boxes that give one answer together: a comma, "and" or "or", and a name with =."""

_ANSWER = re.compile(r"answer[*_`\s]{0,9}:", re.IGNORECASE)
_ANSWER_IS = re.compile(r"answer[^.:\n]{0,99}?\bis\b[*_`\s]{0,9}:?|answer[*_`\s]{0,9}:", re.IGNORECASE)
_DISPLAY = {"$$": "$$", "\\[": "\\]"}
_FORMULA_OR_NUMBER = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(((?:[^\\]|\\[^()])+)\\\)|\\\[((?:[^\\]|\\[^][])+)\\\]"
    r"|(?<![\w.])[-−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?"
)
_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
"""Between two sentences."""
_POINT = re.compile(r"(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)")
_SIGN = re.compile(r"(?<![^\s(\[$€£])[-−](?=[$€£]?\.?\d)")
_KEPT = {0xE000: ".", 0xE001: "-"}
"""Characters of private use, which replace points and signs of numbers while punctuation is removed."""
_RANGES = ((0x2010, 0x205E), (0x3001, 0x3003), (0x3008, 0x3011), (0x3014, 0x301F), (0xFF01, 0xFF0F))
_PUNCTUATION = dict.fromkeys(
    [ord(char) for char in string.punctuation + "¡§«¶·»¿−：；＜＝＞？＠［＼］＾＿｀｛｜｝～｡｢｣､･"]
    + [code for first, last in _RANGES for code in range(first, last + 1)]
)


class _Box(NamedTuple):
    """A box that is closed."""

    start: int
    end: int
    content: slice


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed` or `\fbox` of a text frames, or None.

    None also where the last box is never closed: the answer was started again, so an earlier box is not
    the answer. A box with nothing in it is passed over. Of nested boxes the outermost counts. Boxes with
    only a comma, "and" or "or" between them give one answer together, joined by commas.
    """
    boxes: list[_Box] = []  # those that are closed
    unfinished = -1
    open_braces: list[tuple[int, int]] = []  # place of the brace, start of its box or -1
    waiting = (-1, -1)  # place of the brace that a box waits for, start of that box
    for mark in _MARK.finditer(text):
        if mark[0] == "{":
            brace = mark.start()
            open_braces.append((brace, waiting[1] if waiting[0] == brace else -1))
        elif mark[0] == "}":
            if open_braces:
                brace, start = open_braces.pop()
                if start >= 0 and _after_space(text, brace + 1) < mark.start():
                    boxes.append(_Box(start, mark.end(), slice(brace + 1, mark.start())))
        elif mark[0].endswith(("boxed", "fbox")):
            place = _after_space(text, mark.end())
            if place == len(text):
                unfinished = mark.start()
            elif text[place] == "{":
                waiting = (place, mark.start())
            elif found := _BARE_BOX.match(text, place):
                end = _end_of_command(text, found)
                boxes.append(_Box(mark.start(), end, slice(place, end)))
    unfinished = max([unfinished, *(start for _, start in open_braces)])
    boxes.sort()
    if not boxes or unfinished > boxes[-1].start:
        return None
    outermost: list[_Box] = []
    for box in boxes:
        if not outermost or box.start >= outermost[-1].end:
            outermost.append(box)
    parts = [outermost.pop()]
    while outermost and _BETWEEN.fullmatch(text, outermost[-1].end, parts[-1].start):
        parts.append(outermost.pop())
    return ", ".join(text[box.content] for box in reversed(parts))


def _after_space(text: str, place: int) -> int:
    """Return the first place from `place` on that is no white space."""
    space = _SPACE.match(text, place)
    assert space is not None, "it matches the empty text, too"
    return space.end()


def _end_of_command(text: str, found: re.Match[str]) -> int:
    r"""Return where the content of an unbraced box ends: after the groups of a command such as `\frac`."""
    end = found.end()
    if not found[1].startswith("\\"):
        return end
    while end < len(text) and text[end] == "{":
        depth = 0
        for mark in _MARK.finditer(text, end, end + 1000):
            depth += {"{": 1, "}": -1}.get(mark[0], 0)
            if depth == 0:
                end = mark.end()
                break
        else:
            return end
    return end


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern in a text, or None."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def after_answer(text: str, *, colon: bool = True) -> str | None:
    """Return the line after the last "Answer:" of a text, or None; a box in that line is the answer.

    `colon=False` also takes "the answer is". A displayed formula counts whole, though it has several lines.
    """
    pattern = _ANSWER_IS
    if colon:
        pattern = _ANSWER
    last = last_match(pattern, text)
    if last is None:
        return None
    rest = text[last.end() :].lstrip("*_` \t\r\n")
    line = rest.partition("\n")[0]
    closing = _DISPLAY.get(line.strip()[:2], "")
    if closing and closing not in line.strip()[2:]:
        line = rest.strip()[2:].partition(closing)[0]
    line = line.strip().strip("*_`").strip()
    return last_boxed(line) or line


def last_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last `<tag>...</tag>` of a text, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    if start < 0:
        return None
    return text[start + len(tag) + 2 : end]


def unboxed_answer(text: str) -> str | None:
    """Return the answer of a text without a box; None without any.

    It is the first sentence behind the last "answer is" or "Answer:", else the last formula or number of the
    text. Of a sentence with a formula in it, too, the last formula or number counts.
    """
    stated = after_answer(text, colon=False)
    if stated is not None:
        stated = _SENTENCE.split(stated, maxsplit=1)[0]
        if not any(mark in stated for mark in ("$", "\\(", "\\[")):
            return stated
    last = last_match(_FORMULA_OR_NUMBER, stated or text)
    if last is None:
        return stated
    return next(filter(None, last.groups()), last[0])


def plain_words(text: str) -> str:
    """Return a text in lower case, with single spaces and without punctuation that is no part of a number.

    A text of nothing but punctuation keeps it: + is not -.
    """
    marked = _SIGN.sub("\ue001", _POINT.sub("\ue000", text.lower()))
    words = marked.translate(_PUNCTUATION).translate(_KEPT).split()
    return " ".join(words or text.split())
