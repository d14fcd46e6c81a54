"""GLM-4.5 and later: `<tool_call>NAME`, then a pair of `<arg_key>` and `<arg_value>` for each argument, then
`</tool_call>`.
"""

from __future__ import annotations

import re

from hybridflow.tools.parsers.base import TaggedParser, ToolCall, as_json, matches, value_of

NAME = re.compile(r"\s*([^\s<]+)\s*")
ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>\s*|\Z)", re.DOTALL)


class GlmParser(TaggedParser):
    """Parser of names and pairs of tags; a value that is JSON is taken as such, any other as a string."""

    start = "<tool_call>"
    stop = "</tool_call>"
    needs_special_tokens = True

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the first argument where a tool is named."""
        return self.start + (f"{name}\n" if name else "")

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the call of one pair of tags."""
        name = NAME.match(body)
        if name is None:
            return None
        pairs = matches(ARGUMENT, body[name.end() :])
        if pairs is None:
            return None
        return [ToolCall(name[1], as_json({pair[1].strip(): value_of(pair[2]) for pair in pairs}))]
