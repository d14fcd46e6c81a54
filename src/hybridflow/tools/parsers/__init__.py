"""Formats in which families of models write tool calls: one format a file, one table of all parsers."""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.tools.parsers.base import ToolCall, ToolParser
from hybridflow.tools.parsers.hermes import HermesParser
from hybridflow.tools.parsers.llama3_json import Llama3JsonParser
from hybridflow.tools.parsers.qwen3_coder import Qwen3CoderParser

__all__ = ["TOOL_PARSERS", "ToolCall", "ToolParser", "parser_of_template"]

TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "qwen3_coder": Qwen3CoderParser,
}


def parser_of_template(template: str) -> str | None:
    """Return the name of the format whose tags are in a chat template, or None."""
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None
