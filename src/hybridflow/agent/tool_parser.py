"""verl's form of a parser of tool calls, for agent loops that read calls in what the model has sampled.

parser = ToolParser.get_tool_parser("hermes", tokenizer)
text, calls = await parser.extract_tool_calls(response_ids)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError
from hybridflow.tools.parsers import TOOL_PARSERS, parser_of_template
from hybridflow.tools.parsers import ToolCall as FunctionCall

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
        """Return the plain text of a response, and its calls; a call that cannot be read is plain text."""
        parser = TOOL_PARSERS[self.name]()
        ids = list(responses_ids)
        if ids[-1:] == [self.tokenizer.eos_token_id]:
            ids.pop()
        text = str(self.tokenizer.decode(ids, skip_special_tokens=not parser.needs_special_tokens))
        found = [*parser.feed(text), *parser.end()]
        plain = "".join(each for each in found if isinstance(each, str))
        return plain, [each for each in found if isinstance(each, FunctionCall)]
