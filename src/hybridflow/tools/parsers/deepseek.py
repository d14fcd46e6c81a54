"""DeepSeek V3 and R1 (`function<｜tool▁sep｜>NAME`, then fenced JSON) and V3.1 (`NAME<｜tool▁sep｜>{…}`); one
pair of tags stands around all calls of a turn.
"""

from __future__ import annotations

import re

from hybridflow.tools.parsers.base import TaggedParser, ToolCall, json_calls

CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)(?:\n```json\n|<｜tool▁sep｜>)"
    r"(?P<arguments>.*?)(?:\n```)?(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)


class DeepSeekParser(TaggedParser):
    """Parser of calls between special tokens."""

    start = "<｜tool▁calls▁begin｜>"
    stop = "<｜tool▁calls▁end｜>"
    needs_special_tokens = True

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return f"{self.start}<｜tool▁call▁begin｜>" + (f"{name}<｜tool▁sep｜>" if name else "")

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the calls of a turn."""
        return json_calls(CALL, body)
