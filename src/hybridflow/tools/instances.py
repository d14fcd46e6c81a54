"""Objects that stand for a tool of one trajectory, in a worker process or in this one.

create ──► execute for each call ──► finish, which gives the reward and forgets the trajectory
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.data.plugin import load_object
from hybridflow.tools.base import ToolAnswer, answer_of, finite_reward
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema


@functools.cache
def _load(spec: str) -> Any:
    return load_object(spec, key="tool")


class FunctionInstance:
    """A function; it pickles as its name, because each process imports a user's file by itself."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    async def execute(self, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]) -> ToolAnswer:
        """Call the function; a synchronous one in a thread, so that an event loop goes on meanwhile."""
        function: Callable[..., Any] = _load(self.spec)
        if inspect.iscoroutinefunction(function):
            return answer_of(await function(**arguments, **execute_kwargs))
        return answer_of(await asyncio.to_thread(function, **arguments, **execute_kwargs))


class ToolInstance:
    """One trajectory's instance of a `BaseTool`, whose class is `spec`: "module:Class"."""

    def __init__(self, spec: str, tool: BaseTool) -> None:
        self.spec = spec
        self.tool = tool
        self.instance_id = ""

    def __getstate__(self) -> dict[str, Any]:
        # as bytes: they are read only when the module of the user's class is there
        return {"spec": self.spec, "rest": pickle.dumps((self.instance_id, self.tool))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.spec = state["spec"]
        _load(self.spec)
        self.instance_id, self.tool = pickle.loads(state["rest"])

    async def create(self, create_kwargs: Mapping[str, Any]) -> None:
        """Begin the trajectory: verl's tools read `create_kwargs` in either of two ways."""
        made = await self.tool.create(None, create_kwargs=dict(create_kwargs), **create_kwargs)
        self.instance_id = made if isinstance(made, str) else made[0]

    async def execute(self, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]) -> ToolAnswer:
        return answer_of(await self.tool.execute(self.instance_id, arguments, **execute_kwargs))

    async def finish(
        self, score: bool, calc_reward_kwargs: Mapping[str, Any], release_kwargs: Mapping[str, Any]
    ) -> float:
        """Return the reward of the trajectory where `score` asks for it, and forget the trajectory."""
        try:
            if not score:
                return 0.0
            return finite_reward(await self.tool.calc_reward(self.instance_id, **calc_reward_kwargs))
        finally:
            await self.tool.release(self.instance_id, **release_kwargs)


def make_tool(spec: str, config: str, schema: str) -> ToolInstance:
    """Return an instance with a tool of its own, whose configuration and schema are given as JSON."""
    tool = _load(spec)(json.loads(config), OpenAIFunctionToolSchema.model_validate_json(schema))
    return ToolInstance(spec, tool)
