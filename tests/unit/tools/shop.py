"""Tools of the tests: functions, and classes with verl's contract."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from hybridflow.tools import tool
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


@tool
def add(a: int, b: int = 1) -> tuple[str, float]:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b), 0.5


@tool
async def echo(text: str, twice: bool = False) -> dict[str, str]:
    """Say it again."""
    return {"text": text * (1 + twice)}


@tool
def fail() -> str:
    """Fail."""
    raise KeyError("nothing here")


@tool
async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@tool(in_process=True)
def thread() -> str:
    """Say whether it runs in the main thread."""
    return str(threading.current_thread() is threading.main_thread())


@tool
def die() -> str:
    """End the process."""
    os._exit(3)


@tool(in_process=True)
def daemon() -> bool:
    """Say whether the interpreter may end while this call is under way."""
    return threading.current_thread().daemon


SCHEMA = {
    "type": "function",
    "function": {
        "name": "basket",
        "description": "Puts something into the basket.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


class Basket(BaseTool):
    """Counts what was put in; its reward is the number of items over what was wanted."""

    default_schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.items: dict[str, list[str]] = {}
        self.wanted: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, wanted: int = 1, **kwargs: Any) -> Any:
        assert kwargs["create_kwargs"] in ({}, {"wanted": wanted})
        instance_id, response = await super().create(instance_id)
        self.items[instance_id] = []
        self.wanted[instance_id] = wanted
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        items = self.items[instance_id]
        items.append(parameters["item"] + kwargs.get("suffix", ""))
        return ToolResponse(text=" ".join(items)), None, {"items": len(items), "shop": "corner"}

    async def calc_reward(self, instance_id: str, bonus: float = 0.0, **kwargs: Any) -> float:
        if self.config.get("broken"):
            raise ValueError("no scales")
        return len(self.items[instance_id]) / self.wanted[instance_id] + bonus

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.items[instance_id]
