"""Text of a response as it comes, read from left to right by readers that pause where it ends for now.

feed ──add──► TextSource ──until, run, json_text, …──► a reader: a generator that yields to wait for text

A reader decides only on text that no further text can change, so that it reads the same however the text is
cut. Each character is read a bounded number of times: the time is linear in the length of the response.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Pausing = Generator[None, None, T]
"""A reader with a result, which yields where it has to wait for text."""

SLICE = 4096
"""Characters that a reader sees at once; what it leaves of them is copied when more come."""
GOING_BACK = 4
"""Times that the text read so far may be read again after calls that could not be read."""
SPACE = re.compile(r"\s*")
OUTSIDE = re.compile(r"[ \t\r\n:,0-9+\-.EtruefalsnINiy]*")
"""What JSON has outside of strings and brackets: in numbers, and in true, false, null, NaN and Infinity."""
INSIDE = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
"""Letters of a JSON string, with whole escapes."""
CLOSING = {"{": "}", "[": "]"}


class Unreadable(ValueError):
    """A call that was begun cannot be read; the text is the reason, to go on after "could not be read:"."""


class Tags:
    """Texts that are looked for together."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self.longest = max(map(len, texts), default=0)
        self._first_letters = {text[0] for text in texts}

    def held(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a tag."""
        if self._first_letters.isdisjoint(text):
            return 0
        return max((overlap(text, tag) for tag in self.texts), default=0)


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `tag`, without the whole of it."""
    place = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while place >= 0:
        if tag.startswith(text[place:]):
            return len(text) - place
        place = text.find(tag[0], place + 1)
    return 0


class TextSource:
    """The text that has come and was not read; methods that may have to wait for more are generators."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._window = ""
        self._place = 0
        self._noted: list[str] | None = None
        self._has_ended = False
        self.is_cut = False
        """Whether the response was cut at its end, so that what is missing there may be a part of a call."""
        self.num_read = 0
        """Characters that were read; those that were given back count again."""
        self._given_back = 0
        self._noted_from = 0  # place in the response
        self._certain_to = 0

    def add(self, text: str) -> None:
        """Add text that has come."""
        self._waiting.extend(text[place : place + SLICE] for place in range(0, len(text), SLICE))

    def end(self, cut: bool) -> None:
        """Mark the end of the text, and whether the response was truncated."""
        self._has_ended = True
        self.is_cut = cut

    def note(self, text: str) -> None:
        """Record the text read from here on, behind `text`, until `noted` is called."""
        self._noted = [text]
        self._noted_from = self._place_in_response - len(text)

    def noted(self) -> str:
        """Return the text that was noted, and stop noting."""
        assert self._noted is not None, "a reader notes a call before it reads it"
        text = "".join(self._noted)
        self._noted = None
        return text

    def make_certain(self) -> None:
        """Mark the text read so far as certain, whatever comes: closed values, for example."""
        self._certain_to = self._place_in_response

    @property
    def num_certain(self) -> int:
        """Characters at the beginning of the noted text, asked for or not, that are certain."""
        return max(0, self._certain_to - self._noted_from)

    @property
    def _place_in_response(self) -> int:
        return self.num_read - self._given_back

    def may_go_back(self, count: int) -> bool:
        """Return whether `count` characters may be read again, so that the time stays linear."""
        return self._given_back + count <= GOING_BACK * self._place_in_response

    def give_back(self, text: str) -> None:
        """Give back the text that was read last, which is then read again."""
        self._given_back += len(text)
        self._waiting.appendleft(self._window[self._place :])
        self._waiting.extendleft(reversed([text[at : at + SLICE] for at in range(0, len(text), SLICE)]))
        self._window = ""
        self._place = 0
        if self._noted is not None:
            whole = "".join(self._noted)
            self._noted = [whole[: len(whole) - len(text)]]

    def take(self, count: int) -> str:
        """Read `count` characters, which have arrived."""
        text = self._window[self._place : self._place + count]
        self._place += count
        self.num_read += count
        if self._noted is not None and text:
            self._noted.append(text)
        return text

    def more(self) -> Pausing[bool]:
        """Wait for text; return False where none comes any more."""
        while not self._waiting:
            if self._has_ended:
                return False
            yield
        self._window = self._window[self._place :] + self._waiting.popleft()
        self._place = 0
        return True

    def until(self, tags: Tags, give: Callable[[str], object], most: int = sys.maxsize) -> Pausing[str]:
        """Read up to the first of `tags` and past it; return it, or "" where the response ends before.

        `give` is handed the text before it, each part as soon as it is certain. Raises Unreadable for more
        than `most` characters of it.
        """
        while True:
            found = tags.pattern.search(self._window, self._place)
            certain = len(self._window)
            if found is not None:
                certain = found.start()
            elif not self._is_at_the_end:
                certain -= tags.held(self._window[max(self._place, certain - tags.longest) :])
            if certain - self._place > most:
                give(self.take(most))
                raise Unreadable("it is not written as the format wants it")
            most -= certain - self._place
            give(self.take(certain - self._place))
            if found is not None:
                return self.take(len(found[0]))
            if not (yield from self.more()) and self._place == len(self._window):
                return ""

    def run(self, pattern: re.Pattern[str]) -> Pausing[str]:
        """Read the characters that match `pattern`, which is a class of characters, repeated."""
        parts = []
        while True:
            match = pattern.match(self._window, self._place)
            assert match is not None, "a repeated class of characters matches everywhere"
            parts.append(self.take(match.end() - self._place))
            if self._place < len(self._window) or not (yield from self.more()):
                return "".join(parts)

    def here(self, tags: Tags) -> Pausing[str]:
        """Return the tag that comes next, which is not read, or ""."""
        while True:
            rest = self._window[self._place : self._place + tags.longest]
            tag = next((tag for tag in tags.texts if rest.startswith(tag)), "")
            if tag or not any(tag.startswith(rest) for tag in tags.texts):
                return tag
            if not (yield from self.more()):
                return ""

    def at(self, tags: Tags) -> Pausing[str]:
        """Read the tag that comes next and return it, or "" where there is another text."""
        tag = yield from self.here(tags)
        self.take(len(tag))
        return tag

    def letter(self) -> Pausing[str]:
        """Return the next character, which is not read, or "" at the end of the response."""
        while self._place == len(self._window):
            if not (yield from self.more()):
                return ""
        return self._window[self._place]

    def json_text(self, opened: str = "") -> Pausing[str]:
        """Read one JSON object, list or string, and return its text.

        `opened` is its first letter where that was read before. What stands in strings does not count,
        whatever it looks like. A string is certain where JSON goes on behind it: the quote that ends it is
        not the one that begins the next. Raises Unreadable at the first character that cannot be JSON, and
        where the response ends before the value.
        """
        parts = [opened]
        closing = [CLOSING[bracket] for bracket in opened if bracket in CLOSING]
        inside = opened == '"'
        while True:
            match = (INSIDE if inside else OUTSIDE).match(self._window, self._place)
            assert match is not None, "both match the empty text"
            parts.append(self.take(match.end() - self._place))
            if not inside and match[0].lstrip().startswith((",", ":")):
                self.make_certain()
            letter = self._window[self._place : self._place + 1]
            if not letter or (inside and letter == "\\"):  # half an escape
                if not (yield from self.more()):
                    raise Unreadable("its JSON is not closed")
                continue
            if letter == '"':
                inside = not inside
            elif letter in CLOSING:
                closing.append(CLOSING[letter])
            elif closing and letter == closing[-1]:
                closing.pop()
                self.make_certain()
            else:
                raise Unreadable(f"its JSON breaks off before {letter!r}")
            parts.append(self.take(1))
            if not closing and not inside:
                return "".join(parts)

    @property
    def _is_at_the_end(self) -> bool:
        return self._has_ended and not self._waiting
