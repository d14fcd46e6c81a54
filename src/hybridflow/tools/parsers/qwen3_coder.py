"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`."""

from __future__ import annotations

import re

from hybridflow.tools.parsers.base import TaggedParser, ToolCall, as_json, matches, value_of

FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class Qwen3CoderParser(TaggedParser):
    """Parser of nested tags; a value that is JSON is taken as such, any other as a string."""

    start = "<tool_call>"
    stop = "</tool_call>"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the first parameter where a tool is named."""
        return f"{self.start}\n<function=" + (f"{name}>\n" if name else "")

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the calls of one pair of tags, or None where anything else stands between them."""
        calls = []
        for function in matches(FUNCTION, body) or ():
            parameters = matches(PARAMETER, function[2])
            if parameters is None:
                return None
            arguments = {parameter[1]: value_of(parameter[2]) for parameter in parameters}
            calls.append(ToolCall(function[1], as_json(arguments)))
        return calls or None
