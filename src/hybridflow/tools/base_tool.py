"""verl's contract of a tool: create, execute, calc_reward and release, by the id of a trajectory's instance.

class Shop(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=f"{parameters['item']} costs 3"), 0.0, {}
"""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import uuid4

from hybridflow.errors import ConfigError
from hybridflow.tools.base import AfterLoss
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """Base class of the tools in `tool_config_path`.

    A tool runs in a worker process that is killed at the deadline of a call, so each trajectory has its
    own object, which travels by pickle. Where `in_process` is true, one object serves all trajectories in the
    driver, and keeps what belongs to one of them under its `instance_id`; that is for tools which only await
    the network. `config: {in_process: true}` in the file says the same of a single tool.
    """

    in_process: ClassVar[bool] = False
    after_loss: ClassVar[AfterLoss] = "repeat"
    """Policy for a call whose process was lost before it had answered; `config: {after_loss: fail}` in
    the file says it of a single tool. One that is repeated gets all calls of its trajectory again.
    """
    default_schema: ClassVar[OpenAIFunctionToolSchema | None] = None
    """Schema where the file gives no `tool_schema`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        schema = tool_schema or self.default_schema
        if schema is not None:
            self.tool_schema = schema
        elif type(self).get_openai_tool_schema is not BaseTool.get_openai_tool_schema:
            self.tool_schema = self.get_openai_tool_schema()
        else:
            raise ConfigError(f"the tool {type(self).__name__} has no tool_schema: give it in the file")
        self.name = self.tool_schema.function.name

    @classmethod
    def connect(cls, config: dict[str, Any], mcp: dict[str, Any]) -> list[BaseTool]:
        """Return the tools of MCP servers, where `config.type` is mcp; see `MCPBaseTool`."""
        raise ConfigError(
            f"config.type is mcp, which wants a subclass of MCPBaseTool, and got {cls.__name__}"
        )

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema that the model is given."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a trajectory with the `create_kwargs` of its row, spread and as one argument of that name."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Answer a call: what the model reads, the reward of the call, and numbers for the trackers.

        With an argument `call_id`, which has a default, it is given the id of the call.
        """
        return ToolResponse(), 0.0, {}

    async def outcome(self, instance_id: str, call_id: str) -> Any:
        """Return what `execute` has returned for a call, or None where it was not carried out (`ask`)."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's reward for the whole trajectory, added to those of the calls."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a trajectory."""

    def close(self) -> None:
        """Free what the tool holds in the driver; called once, at the end of the run."""
