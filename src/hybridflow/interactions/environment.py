"""An interaction as an environment, chosen by the row.

row: extra_info.interaction_kwargs {name, …} ──► the interaction of that name ──► its turns as `Step`s

The interactions come from a YAML file (`multi_turn.interaction_config_path`), in verl's form:

interaction:
  - name: gsm8k          # without it: the class's name without "Interaction", in small letters
    class_name: hybridflow.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from hybridflow.data.plugin import blaming, load_class, load_entries
from hybridflow.environments.base import Environment, Step
from hybridflow.errors import ConfigError, DataError
from hybridflow.interactions.base import BaseInteraction

KEY = "multi_turn.interaction_config_path"
METHODS = {
    "start_interaction(self, instance_id=None, **kwargs)": ("self", "instance_id"),
    "generate_response(self, instance_id, messages, **kwargs)": ("self", "instance_id", "messages"),
    "finalize_interaction(self, instance_id, **kwargs)": ("self", "instance_id"),
}
"""How methods of an interaction are written, and the arguments that they are called with."""
DEFAULT_NAME = "gsm8k"
"""Interaction of a row that names none, as in verl."""


@cache
def load_interactions(path: str) -> Mapping[str, Callable[[], BaseInteraction]]:
    """Return what constructs each interaction of a YAML file, by name; a process reads the file once.

    A `class_name` may also be path/to/file.py:Name. Raises ConfigError for a file of another form, two
    entries of one name, and a class that does not load.
    """
    found: dict[str, Callable[[], BaseInteraction]] = {}
    for entry in load_entries(path, "interaction", "class_name", key=KEY):
        cls = load_class(entry["class_name"], key=f"{KEY}: {path}: class_name", methods=METHODS)
        if not isinstance(cls, type):
            raise ConfigError(f"{KEY}: {path}: {entry['class_name']} is no class")
        name = str(entry.get("name") or cls.__name__.removesuffix("Interaction").lower())
        if name in found:
            raise ConfigError(f"{KEY}: {path} has two interactions with the name {name}")
        config = {**(entry.get("config") or {}), "name": name}
        found[name] = partial(_construct, cls, config, f"{KEY}: {path}: {name}")
    return found


def _construct(cls: type[BaseInteraction], config: Mapping[str, Any], whose: str) -> BaseInteraction:
    with blaming(whose):
        return cls(dict(config))


class InteractionEnvironment(Environment):
    """The interactions of the YAML file `config_path`; raises ConfigError as `load_interactions` does.

    A trajectory has its own interaction, with which it can go from process to process.
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
