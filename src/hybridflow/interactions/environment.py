"""An interaction as an environment, chosen by the row.

row: extra_info.interaction_kwargs {name, …} ──► the interaction of that name ──► its turns as `Step`s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.environments.base import Environment, Step
from hybridflow.errors import DataError
from hybridflow.interactions.load import load_interactions

DEFAULT_NAME = "gsm8k"
"""Interaction of a row that names none, as in verl."""


class InteractionEnvironment(Environment):
    """The interactions of the YAML file `config_path`; raises ConfigError as `load_interactions` does.

    A trajectory has an interaction of its own, with which it can go from process to process.
    """

    def __init__(self, config_path: str) -> None:
        self.config_path = config_path
        load_interactions(config_path)
        self.instance: str | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begin with the row's own prompt. Raises DataError for the name of no interaction."""
        self.kwargs = dict((row.get("extra_info") or {}).get("interaction_kwargs") or {})
        name = self.kwargs.setdefault("name", DEFAULT_NAME)
        interactions = load_interactions(self.config_path)
        if name not in interactions:
            raise DataError(
                f"extra_info.interaction_kwargs.name: got {name!r}, wanted one of {', '.join(interactions)}"
            )
        prompt = row["raw_prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        self.messages = [dict(message) for message in prompt]
        self.interaction = interactions[name]()
        self.instance = await self.interaction.start_interaction(None, **self.kwargs)
        return list(self.messages)

    async def step(self, text: str) -> Step:
        """Give the interaction the conversation so far."""
        assert self.instance is not None, "reset comes first"
        self.messages.append({"role": "assistant", "content": text})
        done, response, score, metadata = await self.interaction.generate_response(
            self.instance, self.messages, **self.kwargs
        )
        self.messages.append({"role": "user", "content": response})
        return Step(response, float(score), done, metadata or {})

    async def close(self) -> None:
        """Finalize what was started."""
        if self.instance is not None:
            await self.interaction.finalize_interaction(self.instance)
            self.instance = None
