"""Code that a model writes to be run: a block fenced by ```python is a call of one tool, with {"code": …}.

The block ends with a fence that begins its line, as in Markdown, or ends a line of code. Any other ``` is
part of the code, such as that of an indented docstring.
"""

from __future__ import annotations

from typing import ClassVar

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ToolCall, as_json
from hybridflow.tools.parsers.source import Pausing, Tags, Unreadable

FENCE = "```"
MOST_INDENTED = 3
"""Spaces before a closing fence, as in Markdown."""


class FencedPythonParser(TaggedParser):
    """Parser of fenced blocks."""

    tool: ClassVar[str] = "python"
    """Name of the tool that runs them."""
    starts = ("```python",)
    example = "```python\nCODE\n```"

    def opening(self, name: str | None) -> str:
        """Return the beginning of a block."""
        return f"{self.starts[0]}\n"

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the code of one block; its closing fence may be missing."""
        source = self._source
        first: list[str] = []
        if (yield from source.until(Tags("\n", FENCE), first.append)) != "\n":
            raise Unreadable("there is no code in its block")
        code: list[str] = []
        before = ""  # of the line, where that matters
        while True:
            begun = len(code)
            found = yield from source.until(Tags(FENCE, "\n"), code.append)
            before += "".join(code[begun:])
            if not found or (found == FENCE and (yield from self._closes(before))):
                break
            code.append(found)
            before = "" if found == "\n" else FENCE
        written = "".join(code)
        if not found and source.is_cut:
            raise Unreadable("its block has no end")
        if not written.strip():
            raise Unreadable("there is no code in its block")
        return [ToolCall(self.tool, as_json({"code": written}))]

    def _closes(self, before: str) -> Pausing[bool]:
        """Return whether a fence ends its block, by what stands before it in its line, and behind it."""
        if not before.strip():
            return len(before) <= MOST_INDENTED
        return (yield from self._source.letter()) in ("", "\n", "\r")


class CodeInterpreterParser(FencedPythonParser):
    """The same, for a tool of another name."""

    tool = "code_interpreter"
