"""Tools where they run, in a worker process or in this one.

call_function(path, arguments, …) ──────────────► ToolAnswer
make_tool(path, config, schema, create_kwargs) ─► ToolInstance: execute for each call, then finish
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hybridflow.data.plugin import load_object
from hybridflow.processes import in_thread
from hybridflow.tools.base import ToolAnswer, answer_of, finite_reward
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema


class ToolInstance:
    """One trajectory's instance of a `BaseTool`, which may serve other trajectories, too."""

    def __init__(self, tool: BaseTool, instance_id: str) -> None:
        self._tool = tool
        self._instance_id = instance_id

    async def execute(self, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]) -> ToolAnswer:
        """Answer a call."""
        return answer_of(await self._tool.execute(self._instance_id, arguments, **execute_kwargs))

    async def finish(
        self, score: bool, calc_reward_kwargs: Mapping[str, Any], release_kwargs: Mapping[str, Any]
    ) -> float:
        """Return the reward of the trajectory where `score` asks for it, and forget the trajectory."""
        try:
            if not score:
                return 0.0
            return finite_reward(await self._tool.calc_reward(self._instance_id, **calc_reward_kwargs))
        finally:
            await self._tool.release(self._instance_id, **release_kwargs)


async def call_function(
    path: str, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]
) -> ToolAnswer:
    """Call "module:function"; a synchronous one in a thread, so that an event loop goes on meanwhile."""
    function = load_object(path, key="tool")
    if inspect.iscoroutinefunction(function):
        return answer_of(await function(**arguments, **execute_kwargs))
    return answer_of(await in_thread(function, **arguments, **execute_kwargs))


async def begin_trajectory(tool: BaseTool, create_kwargs: Mapping[str, Any]) -> ToolInstance:
    """Return a new instance; verl's tools read `create_kwargs` in either of two ways."""
    made = await tool.create(None, create_kwargs=dict(create_kwargs), **create_kwargs)
    return ToolInstance(tool, made if isinstance(made, str) else made[0])


async def make_tool(
    path: str, config: dict[str, Any], schema: OpenAIFunctionToolSchema, create_kwargs: Mapping[str, Any]
) -> ToolInstance:
    """Return an instance of a tool "module:Class" that serves one trajectory alone."""
    return await begin_trajectory(load_object(path, key="tool")(config, schema), create_kwargs)
