"""verl's tool that checks a model's answer to a question of GSM8K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridflow.data.gsm8k import is_answer
from hybridflow.errors import DataError
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, schema_with

PENALTY = -0.05
"""Reward of a call whose answer is no better than the one before, as in verl."""


@dataclass
class Instance:
    """State of one trajectory."""

    ground_truth: Any
    reward: float = 0.0


class Gsm8kTool(BaseTool):
    """Scores the `answer` of a call against `create_kwargs.ground_truth` of the row.

    Its reward is the score of the last answer. An answer that is better than the one before costs nothing,
    any other 0.05.
    """

    default_schema = schema_with(
        "calc_gsm8k_reward",
        "A tool for calculating the reward of gsm8k.",
        answer={"type": "string", "description": "The answer: digits only."},
    )

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self.instances: dict[str, Instance] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if ground_truth is None:
            raise DataError(f"the row has no tools_kwargs.{self.name}.create_kwargs.ground_truth")
        instance_id, response = await super().create(instance_id)
        self.instances[instance_id] = Instance(ground_truth)
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        instance = self.instances[instance_id]
        answer = str(parameters.get("answer", "")).removeprefix("#### ")
        reward = float(bool(is_answer(f"#### {answer}", instance.ground_truth, "flexible")))
        call_reward = 0.0 if reward > instance.reward else PENALTY
        instance.reward = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), call_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self.instances[instance_id].reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.instances[instance_id]
