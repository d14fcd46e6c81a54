"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}, …]`, or in later models
`[TOOL_CALLS]NAME[ARGS]{…}` for each call. What stands behind the JSON is plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ToolCall, calls_of, made_call
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags

HEAD = re.compile(r"([^\s\[{\"]+)(?:\[CALL_ID\]([^\s\[{\"]+))?(?:\[ARGS\])?\s*")


class MistralParser(TaggedParser):
    """Parser of a list of calls, or of names with arguments."""

    starts = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    example = '[TOOL_CALLS] [{"name": NAME, "arguments": {…}}]'
    thinking: ClassVar[Mapping[str, str]] = {"<think>": "</think>", "[THINK]": "[/THINK]"}

    def opening(self, name: str | None) -> str:
        """Return the beginning of a list of calls, up to the arguments where a tool is named."""
        return "[TOOL_CALLS] " + (f'[{{"name": {json.dumps(name)}, "arguments": ' if name else "[")

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read a list of calls, or one call by its name."""
        self._left = "call"
        yield from self._source.run(SPACE)
        if (yield from self._source.here(Tags("{", "["))):
            calls = calls_of((yield from self._json_value()))
        else:
            head, letter = yield from self._head(HEAD, Tags(*self.starts))
            calls = [made_call(head[1], (yield from self._json_value(letter)), head[2])]
        yield from self._behind("</s>", json_is_whole=True)
        return calls
