"""GSM8K with a user who says whether the answer is right, until it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.interactions.base import BaseInteraction
from hybridflow.rewards.functions.gsm8k import compute_score


class Gsm8kInteraction(BaseInteraction):
    """The reward of a turn is 1 where its last number is the row's `ground_truth`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}
        self._answers: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        """Begin a trajectory about a question with this answer."""
        instance_id = await super().start_interaction(instance_id)
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer whether the newest answer is right, and end where it is."""
        answers = [each.get("content") for each in messages if each.get("role") == "assistant"]
        self._answers[instance_id] = str(answers[-1] or "") if answers else ""
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! Reflect on your answer and try again.", score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score the newest answer."""
        result = compute_score("", self._answers[instance_id], self._truths[instance_id], method="flexible")
        return float(result["score"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory."""
        del self._truths[instance_id]
        self._answers.pop(instance_id, None)
