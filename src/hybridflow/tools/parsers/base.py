"""The common part of all formats of tool calls: text in, plain text and whole calls out, in their order.

text ─► thinking set apart ─► a tag that begins a call ─► the format's own reader ─┬► calls
                          └► plain text, at once                                   └► plain text, the reason
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from hybridflow.tools.parsers.calls import ToolCall, parameters_of, read_json
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags, TextSource, Unreadable

THINKING = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|channel|>analysis<|message|>": "<|end|>",
}
"""Texts with which models begin to think, and those with which they end it."""
MORE_JSON = ",:}]\"'"
"""Characters that, behind a whole object, show that it was closed too early."""
JSON_BEGINS = Tags("{", "[", '"')
LONGEST_HEAD = 256
"""Characters from the beginning of a call to its arguments; more of them are no name."""
FIRST_KEYS = Tags(*(f'"{key}"' for key in ("name", "arguments", "parameters", "function", "type", "id")))


class CallParser(ABC):
    """Parser of calls of one format.

    What a model thinks is plain text, and no call is read in it. A call in thinking that never ends is not
    made: it counts among `problems`.
    """

    starts: ClassVar[tuple[str, ...]]
    """Tags that begin a call, or a section of calls."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Tags within a call; where one stands alone, the beginning of a call is missing."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Tags that end a call, or a section."""
    example: ClassVar[str]
    """A call, as a model is asked to write it."""
    thinking: ClassVar[Mapping[str, str]] = {"<think>": "</think>"}
    """Those of `THINKING` that the format has."""

    def __init__(self, tools: Sequence[Any] = (), *, in_thinking: bool = False) -> None:
        """`tools` are those that can be called, in OpenAI's form; `in_thinking` says that the prompt ends
        within thinking, as those of some templates do.
        """
        self.num_calls = 0
        """Calls that were handed out."""
        self.problems: list[str] = []
        """Why each call that was begun could not be read, to go on after "it could not be read:"; the text of
        these calls is in the plain text.
        """
        self.closes_thinking = False
        """Whether a thought has ended that had not begun: then all that stood before it was the thought."""
        self._tools = tools
        self._parameters = parameters_of(tools)
        self.in_thinking = in_thinking
        self._thinking = self.thinking
        self._has_thought = False
        self._source = TextSource()
        self._parts: list[str | ToolCall] = []
        self._texts: list[str] = []  # behind those parts
        self._reading = self._read()

    @property
    def malformed(self) -> int:
        """Number of calls that were begun and could not be read."""
        return len(self.problems)

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that have to be left in a response for it to be read."""
        return (*self.starts, *self.inner, *self.stops, *self._thinking, *self._thinking.values())

    @abstractmethod
    def opening(self, name: str | None) -> str:
        """Return the beginning of a call (of this tool), which behind a prompt makes the model write one."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return plain text as soon as it is certain, and calls as soon as they are whole."""
        self._source.add(text)
        return self._go_on()

    def end(self, cut: bool = False) -> list[str | ToolCall]:
        """Return the held-back parts: calls that lack only their closing tags, and text as it stands.

        `cut` says that a limit has ended the response. Then a call without closing tags may lack more than
        these; it is read only if its JSON is whole.
        """
        self._source.end(cut)
        return self._go_on()

    @abstractmethod
    def _read(self) -> Pausing[None]:
        """Read the whole response: hand out its parts, and note its problems."""

    def _go_on(self) -> list[str | ToolCall]:
        next(self._reading, None)
        self._end_text()
        parts = self._parts
        self._parts = []
        return parts

    def _beginning(self) -> Pausing[None]:
        """Read the beginning of the response, and the text behind a thought."""
        yield from ()

    def _fail(self, tag: str, problem: Unreadable) -> None:
        """Hand out a call that began with `tag` and cannot be read as plain text, and note the reason.

        It ends with the closing tag that was read, or where it could not be read any further. No call that
        stands in a value is made because the rest is wrong: closing tags in values that are certain do not
        count, and those behind their own opening tag do not where there is another.
        """
        text = self._source.noted()
        end = self._end_in(text, max(len(tag), self._source.num_certain))
        if self._source.may_go_back(len(text) - end):
            self._source.give_back(text[end:])
            text = text[:end]
        self._say(text)
        self.problems.append(str(problem))

    def _end_in(self, text: str, start: int) -> int:
        """Return the place of the tag that closes a call, from `start` on, or the end of the text.

        Where an opening tag has no closing one, such as one that is mentioned, the first closing tag counts.
        """
        num_open = 0
        first = len(text)
        for match in Tags(self.starts[0], *self.stops).pattern.finditer(text, start):
            if match[0] == self.starts[0]:
                num_open += 1
            elif not num_open:
                return match.start()
            else:
                num_open -= 1
                first = min(first, match.start())
        return first if num_open else len(text)

    def _say(self, text: str) -> None:
        """Hand out plain text."""
        if text:
            self._texts.append(text)

    def _end_text(self) -> None:
        """Make one part of the texts that stand side by side."""
        if self._texts:
            self._parts.append("".join(self._texts))
            self._texts = []

    def _hand_out(self, calls: list[ToolCall]) -> None:
        self._end_text()
        self._parts += calls
        self.num_calls += len(calls)

    def _think(self) -> Pausing[None]:
        """Hand a thought out as plain text, to the tag that ends it."""
        self._has_thought = True
        thought: list[str] = []
        end = yield from self._source.until(Tags(*self._thinking.values()), self._giving_to(thought))
        self._say(end)
        if end:
            yield from self._beginning()
        else:
            self._check_open_thought("".join(thought))

    def _giving_to(self, thought: list[str]) -> Callable[[str], None]:
        """Return a function that hands out text and adds it to a thought."""

        def give(text: str) -> None:
            self._say(text)
            thought.append(text)

        return give

    def _check_open_thought(self, thought: str) -> None:
        """Report a call in thinking that never ended: it may be meant, and would be lost without a word."""
        drafts = type(self)(self._tools)
        drafts._thinking = {}
        drafts.feed(thought)
        drafts.end()
        if drafts.num_calls:
            end = next(iter(self.thinking.values()))
            self.problems.append(f"it stands within thinking that has no end ({end}), where no call is made")

    def _head(self, head: re.Pattern[str], tags: Tags) -> Pausing[tuple[re.Match[str], str]]:
        """Read the name of a call, and what the format writes between it and its arguments.

        Return the match of `head`, and the first letter of the arguments, which is read too. Raises
        Unreadable where one of `tags`, or anything that is too long for a name, stands in their place.
        """
        parts: list[str] = []
        begins = ("{", '"')
        letter = yield from self._source.until(Tags(*begins, *tags.texts), parts.append, LONGEST_HEAD)
        match = head.fullmatch("".join(parts))
        if letter not in begins:
            self._source.give_back(letter)
        if letter not in begins or match is None:
            raise Unreadable("it is no name with a JSON object as its arguments")
        return match, letter

    def _json_value(self, letter: str = "") -> Pausing[Any]:
        """Read a JSON object, list or text and return it, whose first `letter` may have been read before.

        Raises Unreadable where there is none.
        """
        source = self._source
        if not letter and not (yield from source.here(JSON_BEGINS)):
            other = yield from source.letter()
            raise Unreadable(f"it has no JSON before {other!r}" if other else "its JSON is missing")
        return read_json((yield from source.json_text(letter)))

    def _behind(self, *tags: str, json_is_whole: bool = False) -> Pausing[str]:
        """Read white space and one of `tags`, and return the tag; without one, read nothing and return "".

        Behind a JSON value that should be whole, Unreadable is raised where it goes on: that would be lost.
        """
        space = yield from self._source.run(SPACE)
        tag = yield from self._source.at(Tags(*tags))
        if tag:
            return tag
        letter = yield from self._source.letter()
        if json_is_whole and letter and letter in MORE_JSON:
            raise Unreadable(f"its JSON goes on behind its end, with {letter!r}")
        if letter:
            self._source.give_back(space)
        return ""

    def _bare_object(self) -> Pausing[str]:
        """Read a JSON object at the beginning that may be a call, and return its text; it stays noted.

        Return "" where there is none; what was read is then handed out. Raises Unreadable where it breaks
        off.
        """
        source = self._source
        source.note((yield from source.run(SPACE)))
        if (yield from source.at(Tags("{"))):
            yield from source.run(SPACE)
            if (yield from source.here(FIRST_KEYS)):
                return (yield from source.json_text("{"))
        self._say(source.noted())
        return ""


class TaggedParser(CallParser):
    """Parser of calls that begin with a tag, wherever it stands."""

    def __init__(self, tools: Sequence[Any] = (), *, in_thinking: bool = False) -> None:
        super().__init__(tools, in_thinking=in_thinking)
        self._left: Literal["", "call", "malformed"] = ""
        """What tags that still come belong to: a call that was read, one that was not, or nothing."""

    @abstractmethod
    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the text behind a tag of `starts`, up to the end of the call or section.

        Raises Unreadable where one of its calls cannot be read; then none of them counts.
        """

    def _read(self) -> Pausing[None]:
        source = self._source
        marks = Tags(*self.tags)
        if self.in_thinking:
            yield from self._think()
        else:
            yield from self._beginning()
        while tag := (yield from source.until(marks, self._say)):
            if tag in self._thinking:
                self._say(tag)
                yield from self._think()
            elif tag in self._thinking.values():
                self._say(tag)
                self.closes_thinking |= not self._has_thought
            elif tag in self.starts:
                source.note(tag)
                try:
                    calls = yield from self.block(tag)
                except Unreadable as error:
                    self._fail(tag, error)
                    self._left = "malformed"
                else:
                    source.noted()
                    self._hand_out(calls)
            else:
                # take a tag outside of calls: it belongs to the last one, or to one that has no beginning
                if not self._left:
                    self.problems.append(f"{tag} stands there without {self.starts[0]} before it")
                    self._left = "malformed"
                if self._left == "malformed":
                    self._say(tag)
                if tag in self.stops:
                    self._left = ""
