"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`. The
outer tags may be missing.

One line end is taken off each side of a value, as the chat template puts it there.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ToolCall, made_call
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags, Unreadable
from hybridflow.tools.parsers.typed import properties_of, value_of

FUNCTION = "<function="
PARAMETER = "<parameter="
END_OF_FUNCTION = "</function>"
END_OF_PARAMETER = "</parameter>"
NAME = re.compile(r"[^\s<>]*")
IN_VALUES = Tags(END_OF_PARAMETER, PARAMETER, FUNCTION, END_OF_FUNCTION)
BEHIND_VALUES = Tags(PARAMETER, END_OF_FUNCTION, FUNCTION, "<tool_call>", "</tool_call>")
ENDS = {PARAMETER: END_OF_PARAMETER, FUNCTION: END_OF_FUNCTION}


class Qwen3CoderParser(TaggedParser):
    """Parser of nested tags; values are read by the schemas of the tools (`typed`).

    A value ends with the first `</parameter>` behind which the call goes on or ends: another one is part of
    the value. So are tags of parameters and functions that are closed within it, such as those of an example.
    """

    starts = ("<tool_call>", FUNCTION)
    inner = (PARAMETER, END_OF_PARAMETER, END_OF_FUNCTION)
    stops = ("</tool_call>",)
    example = "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the first parameter where a tool is named."""
        return "<tool_call>\n<function=" + (f"{name}>\n" if name else "")

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the functions of one pair of tags, or a function without them."""
        source = self._source
        calls: list[ToolCall] = []
        self._left = "call"
        if tag != FUNCTION:
            yield from source.run(SPACE)
            if not (yield from source.at(Tags(FUNCTION))):
                raise Unreadable(f"{tag} is not followed by {FUNCTION}NAME>")
        while True:
            calls.append((yield from self._function()))
            end = yield from self._behind(*self.stops, *([FUNCTION] if tag != FUNCTION else []))
            if end in self.stops:
                self._left = ""
            if end != FUNCTION:
                return calls

    def _function(self) -> Pausing[ToolCall]:
        """Read a function from its name to its end; the closing tag may be missing."""
        source = self._source
        name = yield from self._name()
        if not name:
            raise Unreadable(f"its name is not written as {FUNCTION}NAME>")
        arguments: dict[str, Any] = {}
        twice: str | None = None
        while True:
            yield from source.run(SPACE)
            tag = yield from source.at(Tags(PARAMETER, END_OF_FUNCTION))
            if tag != PARAMETER:
                break
            key = yield from self._name()
            if not key:
                raise Unreadable(f"a parameter of {name} is not written as {PARAMETER}KEY>")
            value = yield from self._value(name, key)
            source.make_certain()
            if key in arguments:  # reported at the end: what follows belongs to this call
                twice = key
            arguments[key] = value_of(value, key, self._parameters.get(name))
        if twice is not None:
            raise Unreadable(f"{name} has the parameter {twice} twice")
        if not tag and not (yield from source.here(BEHIND_VALUES)):
            other = yield from source.letter()
            if other:
                raise Unreadable(f"{name} has {other!r} where a parameter or its end should be")
            if source.is_cut:
                raise Unreadable(f"{name} has no end")
        return made_call(name, arguments)

    def _name(self) -> Pausing[str]:
        """Read a name and the bracket that closes its tag; return "" where there is no such name."""
        name = yield from self._source.run(NAME)
        closed = yield from self._source.at(Tags(">"))
        return name if closed else ""

    def _value(self, name: str, key: str) -> Pausing[str]:
        """Read the value of a parameter, and its closing tag."""
        source = self._source
        parts: list[str] = []
        within: list[str] = []  # tags that were opened in the value
        while tag := (yield from source.until(IN_VALUES, parts.append)):
            if tag in ENDS:
                before = next((part[-1] for part in reversed(parts) if part), "\n")
                inner = yield from source.run(NAME)
                closed = yield from source.at(Tags(">"))
                parts += [tag, inner, closed]
                if inner and closed and self._is_tag(tag, inner, name, before, within):
                    within.append(tag)
            elif within and ENDS[within[-1]] == tag:
                within.pop()
                parts.append(tag)
            else:
                space = yield from source.run(SPACE)
                is_behind = yield from source.here(BEHIND_VALUES)
                ends = bool(is_behind) or not (yield from source.letter())
                if ends and tag == END_OF_PARAMETER and not within:
                    return _without_line_ends("".join(parts))
                if ends and tag == END_OF_FUNCTION:
                    break
                parts += [tag, space]
        raise Unreadable(f"the parameter {key} of {name} is not closed")

    def _is_tag(self, tag: str, inner: str, name: str, before: str, within: list[str]) -> bool:
        """Return whether a tag in a value opens something, by the letter before it and by its name.

        Raises Unreadable where it is a parameter of the same call: then the value was not closed.
        """
        known: Container[str] = self._parameters
        if tag == PARAMETER:
            known = properties_of(self._parameters.get(name, {}))
            if FUNCTION not in within and (inner in known or not known):
                raise Unreadable(f"a parameter of {name} is not closed before {tag}{inner}>")
        return before in "\n>" or inner in known or not known


def _without_line_ends(value: str) -> str:
    """Return a value without the line ends on its sides, which a model may write as a whole call has them."""
    if value.startswith("\r\n") and value.endswith("\r\n"):
        return value[2:-2]
    return value.removeprefix("\n").removesuffix("\n")
