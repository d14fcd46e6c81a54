"""Questions of reasoning-gym, each an environment of one turn with the task's scorer (extra `tasks`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.data.tasks.reasoning_gym import ReasoningGymTask
from hybridflow.environments.base import Environment, Step
from hybridflow.rewards.functions.reasoning_gym import compute_score


class ReasoningGym(Environment):
    """One question of the task `task`, for example chain_sum, with that task's `options`.

    The reward is the scorer's, in [0, 1]. Metric: `acc`, which is 1 for a full score.
    """

    after_loss = "repeat"

    def __init__(self, task: str, **options: Any) -> None:
        self.task = task
        self.options = options

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Draw the question that the group's seed decides."""
        self.question = ReasoningGymTask(self.task, seed=self.seed, options=self.options).rows("train", 1)[0]
        messages: list[dict[str, Any]] = self.question["prompt"]
        return messages

    def step(self, text: str) -> Step:
        """Score the answer, and end."""
        question = self.question
        truth = question["reward_model"]["ground_truth"]
        result = compute_score(question["data_source"], text, truth, question["extra_info"])
        return Step(reward=result["score"], done=True, extra={"acc": result["acc"]})
