"""Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

All calls of a turn stand in one section. The text before the arguments is the id of a call, which its result
repeats. The model writes the tags of the section in the plural or in the singular.
"""

from __future__ import annotations

import re

from hybridflow.tools.parsers.sections import SectionParser


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
