"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}, …]`, or in later models
`[TOOL_CALLS]NAME[ARGS]{…}` for each call; a turn ends with its calls.
"""

from __future__ import annotations

import json
import re

from hybridflow.tools.parsers.base import NO_JSON, TaggedParser, ToolCall, call_of, json_calls

CALL = re.compile(
    r"(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\s\[{]+))?(?:\[ARGS\])?\s*(?P<arguments>\{.*?)"
    r"(?:\[TOOL_CALLS\]\s*|\Z)",
    re.DOTALL,
)


class MistralParser(TaggedParser):
    """Parser of a list of calls, or of names with arguments."""

    start = "[TOOL_CALLS]"
    stop = "</s>"
    needs_special_tokens = True

    def opening(self, name: str | None) -> str:
        """Return the beginning of a list of calls, up to the arguments where a tool is named."""
        return f"{self.start} " + (f'[{{"name": {json.dumps(name)}, "arguments": ' if name else "[")

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the calls of a turn."""
        if not body.lstrip().startswith("["):
            return json_calls(CALL, body.lstrip())
        try:
            values = json.loads(body)
        except NO_JSON:
            return None
        calls = [call for value in values if (call := call_of(value, "arguments"))]
        if not calls or len(calls) < len(values):
            return None
        return calls
