"""verl's protocol of an interaction: an object that can serve many trajectories, each under an id.

start_interaction ──► id ──► generate_response(id, messages), once a turn ──► finalize_interaction(id)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Base class of interactions; source: verl's documentation of its interaction system.

    `config` is what the YAML file has under `config`, with the `name` of its entry.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.name = str(config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a trajectory with the row's `interaction_kwargs`, and return its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the last of `messages`, which is the model's.

        Return whether the trajectory ends, the user's next turn, the reward of the model's turn, and
        metadata, of which numbers become metrics. This one ends at once, without a reward.
        """
        return True, "", 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the newest turn; `generate_response` may ask for it, nothing else does."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the trajectory holds."""
