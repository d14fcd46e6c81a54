"""Calls in a section, each between its own tags: a name, and arguments in JSON.

DeepSeek V3 and R1 write `function<｜tool▁sep｜>NAME`, then fenced JSON, and V3.1 `NAME<｜tool▁sep｜>{…}`.
Kimi K2 writes `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`; the text
before the arguments is the id of a call, which its result repeats, and the tags of the section are in the
plural or in the singular.
"""

from __future__ import annotations

import re
from typing import ClassVar

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ToolCall, made_call
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags, Unreadable


class SectionParser(TaggedParser):
    """Parser of sections. The tags of a section may be missing, and so may the last ones of a response."""

    begin: ClassVar[str]
    """Tag that begins a call; it is the last of `starts`."""
    finish: ClassVar[str]
    """Tag that ends a call."""
    head: ClassVar[re.Pattern[str]]
    """What stands between `begin` and the arguments; it has the group `name`, and may have the group `id`."""

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the calls of a section."""
        source = self._source
        calls: list[ToolCall] = []
        self._left = "call"
        if tag != self.begin:
            yield from source.run(SPACE)
            if not (yield from source.at(Tags(self.begin))):
                raise Unreadable(f"{tag} is not followed by {self.begin}")
        while True:
            head, letter = yield from self._head(self.head, Tags(*self.starts, self.finish, *self.stops))
            arguments = yield from self._json_value(letter)
            calls.append(made_call(head["name"], arguments, head.groupdict().get("id")))
            tag = yield from self._behind("```", self.finish, self.begin, *self.stops, json_is_whole=True)
            if tag == "```":
                tag = yield from self._behind(self.finish, self.begin, *self.stops)
            if tag == self.finish:
                tag = yield from self._behind(self.begin, *self.stops)
            if tag in self.stops:
                self._left = ""
            if tag != self.begin:
                return calls


SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekParser(SectionParser):
    """Parser of calls between special tokens."""

    begin = "<｜tool▁call▁begin｜>"
    finish = "<｜tool▁call▁end｜>"
    starts = ("<｜tool▁calls▁begin｜>", begin)
    inner = (SEPARATOR, finish)
    stops = ("<｜tool▁calls▁end｜>",)
    head = re.compile(
        rf"\s*(?:function{SEPARATOR})?(?P<name>[^\s<`]+)\s*(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*"
    )
    example = f"{starts[0]}{begin}NAME{SEPARATOR}{{…}}{finish}{stops[0]}"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return f"{self.starts[0]}{self.begin}" + (f"{name}{SEPARATOR}" if name else "")


class KimiParser(SectionParser):
    """Parser of a section of calls."""

    begin = "<|tool_call_begin|>"
    finish = "<|tool_call_end|>"
    starts = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", begin)
    inner = ("<|tool_call_argument_begin|>", finish)
    stops = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    head = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
    )
    example = f"{starts[0]}{begin}functions.NAME:0{inner[0]}{{…}}{finish}{stops[0]}"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return f"{self.starts[0]}{self.begin}functions." + (f"{name}:0{self.inner[0]}" if name else "")
