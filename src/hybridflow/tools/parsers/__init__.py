"""Formats in which families of models write tool calls: one format a file, one table of all parsers."""

from __future__ import annotations

from hybridflow.tools.parsers.base import CallParser
from hybridflow.tools.parsers.calls import ToolCall
from hybridflow.tools.parsers.fenced_python import CodeInterpreterParser, FencedPythonParser
from hybridflow.tools.parsers.glm import GlmParser
from hybridflow.tools.parsers.gpt_oss import GptOssParser
from hybridflow.tools.parsers.hermes import HermesParser
from hybridflow.tools.parsers.llama3_json import Llama3JsonParser
from hybridflow.tools.parsers.mistral import MistralParser
from hybridflow.tools.parsers.qwen3_coder import Qwen3CoderParser
from hybridflow.tools.parsers.sections import DeepSeekParser, KimiParser

__all__ = ["KNOWN_TAGS", "TOOL_PARSERS", "ToolCall", "parser_of_template"]

TOOL_PARSERS: dict[str, type[CallParser]] = {
    "code_interpreter": CodeInterpreterParser,
    "deepseek": DeepSeekParser,
    "glm": GlmParser,
    "gpt-oss": GptOssParser,
    "hermes": HermesParser,
    "kimi": KimiParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "python": FencedPythonParser,
    "qwen3_coder": Qwen3CoderParser,
}

KNOWN_TAGS = frozenset(tag for parser in TOOL_PARSERS.values() for tag in parser().tags)
"""Tags of all formats. A special token that is one of them has to stay in the text of a response, so that a
call is found, or the format in which it is written.
"""

SIGNS = (
    ("<parameter=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("<|channel|>", "gpt-oss"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("[TOOL_CALLS]", "mistral"),
)
"""Texts in chat templates, and the formats that they identify; the first that is found counts."""


def parser_of_template(template: str) -> str | None:
    """Return the name of the format whose tags are in a chat template, or None."""
    return next((name for sign, name in SIGNS if sign in template), None)
