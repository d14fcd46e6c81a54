"""Tools that a model calls: how they are made and called, and how a model's calls are read."""

from hybridflow.tools.base import Tool, ToolAnswer, ToolProblem, answer_of
from hybridflow.tools.function_tool import function_tool, schema_of, tool, tool_methods

__all__ = [
    "Tool",
    "ToolAnswer",
    "ToolProblem",
    "answer_of",
    "function_tool",
    "schema_of",
    "tool",
    "tool_methods",
]
