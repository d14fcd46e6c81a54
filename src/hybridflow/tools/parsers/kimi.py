"""Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

All calls of a turn stand in one section. The text before the arguments is the id of a call, which its result
repeats.
"""

from __future__ import annotations

import re

from hybridflow.tools.parsers.base import TaggedParser, ToolCall, json_calls

CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)(?:<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)


class KimiParser(TaggedParser):
    """Parser of a section of calls."""

    start = "<|tool_calls_section_begin|>"
    stop = "<|tool_calls_section_end|>"
    needs_special_tokens = True

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        named = f"{name}:0<|tool_call_argument_begin|>" if name else ""
        return f"{self.start}<|tool_call_begin|>functions.{named}"

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the calls of a section."""
        return json_calls(CALL, body)
