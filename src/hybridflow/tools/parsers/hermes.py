"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one pair of tags for
each call.
"""

from __future__ import annotations

import json

from hybridflow.tools.parsers.base import NO_JSON, TaggedParser, ToolCall, call_of


class HermesParser(TaggedParser):
    """Parser of JSON between tags."""

    start = "<tool_call>"
    stop = "</tool_call>"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return f"{self.start}\n" + (f'{{"name": {json.dumps(name)}, "arguments": ' if name else "")

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the call of one pair of tags."""
        try:
            call = call_of(json.loads(body), "arguments")
        except NO_JSON:
            return None
        return None if call is None else [call]
