"""Calls that stand in a section, each between tags of its own: a name, and arguments in JSON."""

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
