"""Interface of the parsers of tool calls, and text that is held back because it may become a tag."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

NO_JSON = (ValueError, RecursionError)
"""What `json` raises for a text that is no JSON, or that is nested too deeply to be read."""


@dataclass(frozen=True)
class ToolCall:
    """Call that a model wrote."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""
    """Name that the model gave the call, where its format has one."""


class ToolParser(Protocol):
    """Parser of one response as it grows: text in, plain text and whole calls out, in their order."""

    needs_special_tokens: bool
    """Whether the format is written with special tokens, so that the text must be decoded with them."""
    malformed: int
    """Number of calls that were begun and could not be read; they are in the plain text."""

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call (of this tool), which behind a prompt makes the model write one."""

    def feed(self, text: str) -> list[str | ToolCall]: ...

    def end(self) -> list[str | ToolCall]:
        """Return what was held back, when no more text comes."""


class TaggedParser(ABC):
    """Parser of calls between two tags."""

    start: str
    stop: str
    needs_special_tokens = False

    def __init__(self) -> None:
        self.malformed = 0
        self._held = ""

    @abstractmethod
    def read(self, body: str) -> list[ToolCall] | None:
        """Return the calls between the tags, or None where there is none."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return plain text at once, and calls when their closing tag has come."""
        self._held += text
        found: list[str | ToolCall] = []
        while True:
            plain, tag, rest = self._held.partition(self.start)
            if not tag:
                keep = overlap(plain, self.start)
                found.append(plain[: len(plain) - keep])
                self._held = plain[len(plain) - keep :]
                break
            body, closing, after = rest.partition(self.stop)
            if not closing:
                found.append(plain)
                self._held = tag + rest
                break
            calls = self.read(body)
            if calls is None:
                self.malformed += 1
                found.append(plain + tag + body + closing)
            else:
                found += [plain, *calls]
            self._held = after
        return [each for each in found if each]

    def end(self) -> list[str | ToolCall]:
        """Return a call whose closing tag is missing, if it is whole, else the text as it stands."""
        held = self._held
        self._held = ""
        if held.startswith(self.start):
            calls = self.read(held.removeprefix(self.start))
            if calls is not None:
                return list(calls)
            self.malformed += 1
        return [held] if held else []


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `tag`, without the whole of it."""
    place = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while place >= 0:
        if tag.startswith(text[place:]):
            return len(text) - place
        place = text.find(tag[0], place + 1)
    return 0


def call_of(value: Any, key: str) -> ToolCall | None:
    """Return the call that a JSON object {"name": …, key: {…}} stands for, or None where it is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, {})
    if not isinstance(arguments, dict) or not _can_be_sent(value["name"]):
        return None
    named = value.get("id")
    if not isinstance(named, str) or not _can_be_sent(named):
        named = ""
    return ToolCall(value["name"], as_json(arguments), named)


def json_calls(pattern: re.Pattern[str], text: str) -> list[ToolCall] | None:
    """Return the calls in a text that is nothing but matches of `pattern`, or None where one is not whole.

    The groups are `name`, `arguments` (a JSON object) and, where the format has one, `id`.
    """
    calls = []
    for match in matches(pattern, text) or ():
        try:
            call = call_of(match.groupdict() | {"arguments": json.loads(match["arguments"])}, "arguments")
        except NO_JSON:
            return None
        if call is None:
            return None
        calls.append(call)
    return calls or None


def matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """Return the matches of `pattern` that follow each other through all of `text`, or None."""
    text = text.rstrip()
    found = []
    place = 0
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            return None
        found.append(match)
        place = match.end()
    return found


def value_of(text: str) -> Any:
    """Return a value that is written without quotes: JSON where it is such, else a string."""
    try:
        return json.loads(text)
    except NO_JSON:
        return text


def as_json(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON that can be sent; half a surrogate pair stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _can_be_sent(text) else json.dumps(arguments)


def _can_be_sent(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
