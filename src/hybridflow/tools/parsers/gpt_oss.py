"""gpt-oss: a message of the assistant to a function,
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`; the channel may stand
behind the function's name.
"""

from __future__ import annotations

import re

from hybridflow.tools.parsers.base import TaggedParser, ToolCall, json_calls

CALL = re.compile(
    r"(?P<name>[^\s<]+)(?:[^<]|<\|(?:channel|constrain)\|>)*<\|message\|>(?P<arguments>.*)", re.DOTALL
)


class GptOssParser(TaggedParser):
    """Parser of messages to functions; all other messages are plain text, marks included."""

    start = "to=functions."
    stop = "<|call|>"
    needs_special_tokens = True

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return f" {self.start}" + (
            f"{name}<|channel|>commentary <|constrain|>json<|message|>" if name else ""
        )

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the call; what the model thought about a function before it is left out."""
        return json_calls(CALL, body.rpartition(self.start)[2])
