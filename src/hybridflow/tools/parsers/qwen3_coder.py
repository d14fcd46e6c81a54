"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`."""

from __future__ import annotations

import json
import re
from typing import Any

from hybridflow.tools.parsers.base import NO_JSON, TaggedParser, ToolCall, as_json

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
        place = 0
        while place < len(body.rstrip()):
            function = FUNCTION.match(body, place)
            if function is None:
                return None
            arguments = {}
            inside = function[2]
            while inside.strip():
                parameter = PARAMETER.match(inside)
                if parameter is None:
                    return None
                arguments[parameter[1]] = _value(parameter[2])
                inside = inside[parameter.end() :]
            calls.append(ToolCall(function[1], as_json(arguments)))
            place = function.end()
        return calls or None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except NO_JSON:
        return text
