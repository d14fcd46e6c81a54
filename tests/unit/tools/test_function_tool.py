"""`@tool`: a schema from a signature and a docstring."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from hybridflow.errors import ConfigError
from hybridflow.tools import ToolAnswer, answer_of, function_tool, schema_of, tool, tool_methods


def test_a_typed_function_with_a_google_docstring() -> None:
    @tool
    def search(
        query: str,
        topk: int = 3,
        *,
        mode: Literal["fast", "exact"] = "fast",
        weights: list[float] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """Search the documents.

        Words are compared exactly.

        Args:
            query (str): what to look for,
                in a few words: nouns are best
            topk: number of documents
            mode: how

        Returns:
            the text: of the documents
        """
        return query

    assert search("a") == "a"
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents.\n\nWords are compared exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "what to look for, in a few words: nouns are best",
                    },
                    "topk": {"type": "integer", "description": "number of documents"},
                    "mode": {"type": "string", "enum": ["fast", "exact"], "description": "how"},
                    "weights": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
                    "extra": {"type": ["object", "null"]},
                },
                "required": ["query"],
            },
        },
    }


def test_a_sphinx_docstring_and_a_name_of_its_own() -> None:
    @tool(name="add", description="Adds.")
    def plus(a: int | float, b: float = 0.0) -> float:
        """Add.

        :param a: the first number,
            of two
        :param float b: the second
        :return: the sum
        """
        return a + b

    function = schema_of(plus)["function"]
    assert (function["name"], function["description"]) == ("add", "Adds.")
    assert function["parameters"]["properties"] == {
        "a": {"type": ["integer", "number"], "description": "the first number, of two"},
        "b": {"type": "number", "description": "the second"},
    }


def test_verls_forms_of_the_decorator() -> None:
    @function_tool("web_search")
    def search(query: str) -> str:
        return query

    given = {"type": "function", "function": {"name": "raw", "parameters": {"type": "object"}}}

    @function_tool(schema=given)
    def raw(**anything: Any) -> str:
        return ""

    assert schema_of(search)["function"]["name"] == "web_search"
    assert schema_of(raw) == given


def test_tools_of_a_class_are_its_marked_methods_and_those_it_inherits() -> None:
    class Room:
        @tool
        async def look(self, where: str) -> str:
            """Look around."""
            return where

        def step(self, text: str) -> None: ...

    class Kitchen(Room):
        @tool("cook_meal")
        def cook(self) -> str:
            return ""

    tools = tool_methods(Kitchen)
    assert {method: schema["function"]["name"] for method, schema in tools.items()} == {
        "look": "look",
        "cook": "cook_meal",
    }
    assert tools["look"]["function"]["parameters"]["required"] == ["where"]


def untyped(x) -> str:  # type: ignore[no-untyped-def]
    return str(x)


def many(*numbers: int) -> str:
    return str(numbers)


def odd(x: bytes) -> str:
    return str(x)


@pytest.mark.parametrize("function", [untyped, many, odd])
def test_an_argument_that_json_cannot_name_is_an_error_that_says_which(function: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{function.__name__}.*argument"):
        schema_of(function)


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        ("text", ToolAnswer("text")),
        (None, ToolAnswer()),
        ({"sum": 3}, ToolAnswer('{"sum": 3}')),
        (7, ToolAnswer("7")),
        (("yes", 0.5), ToolAnswer("yes", 0.5)),
        (("yes", None, {"hits": 2, "status": "ok"}), ToolAnswer("yes", 0.0, {"hits": 2.0})),
        (ToolAnswer("a", 1.0), ToolAnswer("a", 1.0)),
    ],
)
def test_what_a_tool_may_return(returned: Any, answer: ToolAnswer) -> None:
    assert answer_of(returned) == answer


@pytest.mark.parametrize(
    "returned", [("yes", float("nan")), ToolAnswer("yes", float("inf")), ("yes", "much")]
)
def test_a_reward_has_to_be_a_finite_number(returned: Any) -> None:
    with pytest.raises(ValueError, match=r"finite number|could not convert"):
        answer_of(returned)
