"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one pair of tags for
each call.

Several objects between two tags are as many calls. An object at the beginning of a response with the closing
tag behind it is a call whose opening tag is missing.
"""

from __future__ import annotations

import json

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ToolCall, calls_of, read_json
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags, Unreadable


class HermesParser(TaggedParser):
    """Parser of JSON between tags."""

    starts = ("<tool_call>",)
    stops = ("</tool_call>",)
    example = '<tool_call>{"name": NAME, "arguments": {…}}</tool_call>'

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return "<tool_call>\n" + (f'{{"name": {json.dumps(name)}, "arguments": ' if name else "")

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the objects behind an opening tag; the closing one may be missing."""
        calls: list[ToolCall] = []
        self._left = "call"
        yield from self._source.run(SPACE)
        tag = ""
        while True:
            calls += calls_of((yield from self._json_value(tag)))
            tag = yield from self._behind(*self.stops, "{", "[", json_is_whole=True)
            if tag in self.stops:
                self._left = ""
            if tag not in ("{", "["):
                return calls

    def _beginning(self) -> Pausing[None]:
        source = self._source
        try:
            text = yield from self._bare_object()
        except Unreadable:  # an answer in JSON, or a call that the closing tag will reveal
            self._say(source.noted())
            return
        if not text:
            return
        yield from source.run(SPACE)
        tag = yield from source.at(Tags(*self.stops))
        written = source.noted()
        if not tag:
            self._say(written)
            return
        try:
            self._hand_out(calls_of(read_json(text)))
        except Unreadable as error:
            self._say(written)
            self.problems.append(str(error))
