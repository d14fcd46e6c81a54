"""The interactions of a YAML file (`multi_turn.interaction_config_path`), in verl's form:

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
from hybridflow.errors import ConfigError
from hybridflow.interactions.base import BaseInteraction

KEY = "multi_turn.interaction_config_path"
METHODS = {
    "start_interaction(self, instance_id=None, **kwargs)": ("self", "instance_id"),
    "generate_response(self, instance_id, messages, **kwargs)": ("self", "instance_id", "messages"),
    "finalize_interaction(self, instance_id, **kwargs)": ("self", "instance_id"),
}
"""How methods of an interaction are written, and the arguments that they are called with."""


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
