"""Code that a model writes to be run: a block fenced by ```python is a call of one tool, with {"code": …}."""

from __future__ import annotations

from hybridflow.tools.parsers.base import TaggedParser, ToolCall, as_json


class FencedPythonParser(TaggedParser):
    """Parser of fenced blocks; `tool` is the name of the tool that runs them."""

    start = "```python"
    stop = "```"

    def __init__(self, tool: str = "python") -> None:
        super().__init__()
        self.tool = tool

    def opening(self, name: str | None) -> str:
        """Return the beginning of a block."""
        return f"{self.start}\n"

    def read(self, body: str) -> list[ToolCall] | None:
        """Return the call with the code of one block, or None where there is none."""
        _, _, code = body.partition("\n")
        if not code.strip():
            return None
        return [ToolCall(self.tool, as_json({"code": code}))]
