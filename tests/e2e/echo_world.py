"""An environment of three turns for tiny models of random weights: its rewards vary with what they write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.environments import Environment, Step


class Echo(Environment):
    """Gives back what it is told."""

    def reset(self, row: Mapping[str, Any]) -> str:
        self.turns = 0
        return f"{self.seed % 10} + 1"

    def step(self, text: str) -> Step:
        self.turns += 1
        return Step(f"{text}?", reward=sum(map(ord, text)) % 7 / 7, done=self.turns == 3)


ANY_TOKEN_ENDS_A_TURN = f"actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, range(112)))}]"
KEYS = (
    "algorithm.adv_estimator=grpo",
    f"data.environment='{Path(__file__)}:Echo'",
    "actor_rollout_ref.rollout.max_model_len=200",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    ANY_TOKEN_ENDS_A_TURN,
)
"""Keys of a run with it."""
OF_THE_WAY = ("rollout/", "agent/max_concurrent")
"""Metrics that say how the work was done, which hangs on how long each answer took."""
