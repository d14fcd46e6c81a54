"""DeepSeek V3 and R1 (`function<｜tool▁sep｜>NAME`, then fenced JSON) and V3.1 (`NAME<｜tool▁sep｜>{…}`); one
pair of tags stands around all calls of a turn.
"""

from __future__ import annotations

import re

from hybridflow.tools.parsers.sections import SectionParser

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
