"""verl's interface of a tool-call parser, for agent loops that parse the sampled text themselves.

parser = ToolParser.get_tool_parser("hermes", tokenizer)
text, calls = await parser.extract_tool_calls(response_ids)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.data.tokenizer import Tokenizer, text_of, without_special
from hybridflow.errors import ConfigError
from hybridflow.tools.parsers import KNOWN_TAGS, TOOL_PARSERS, parser_of_template
from hybridflow.tools.parsers import ToolCall as FunctionCall
from hybridflow.tools.parsers.response import read_response

__all__ = ["FunctionCall", "ToolParser"]


class ToolParser:
    """Reader of the calls of one format."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        """`name` is a format of `multi_turn.format`; ConfigError for another."""
        if name == "auto":
            name = parser_of_template(getattr(tokenizer, "chat_template", None) or "") or "hermes"
        if name not in TOOL_PARSERS:
            raise ConfigError(f"there is no tool parser {name!r}; wanted auto, {', '.join(TOOL_PARSERS)}")
        self.name = name
        self.tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        """Return the parser of a format."""
        return cls(name, tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the plain text of a response, and its calls; a call that cannot be read is plain text.

        `tools` are the schemas of the tools: formats without quotes, such as Qwen3-Coder's, are read by them.
        """
        ids = list(responses_ids)
        if ids[-1:] == [self.tokenizer.eos_token_id]:
            ids.pop()
        kept = without_special(self.tokenizer, ids, KNOWN_TAGS)
        read = read_response(self.name, text_of(self.tokenizer, kept), tools or ())
        return read.text, read.calls
