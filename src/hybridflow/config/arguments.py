"""The arguments of advantage estimators and policy losses that keys set, as the keys themselves declare it.

config ──argument_values──► {"gamma": 1.0, "clip_low": 0.2, …}       what the maths is called with
schema ──arguments_of_keys──► {"algorithm.gamma": {"gamma"}, …}      what notes and checks go by
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.config.tree import KeyInfo, get_value, keys_of


def argument_keys(root: type[Any]) -> Mapping[str, KeyInfo]:
    """Return the key of a configuration class that sets each argument, by the argument's name."""
    return {info.argument: info for info in keys_of(root).values() if info.argument}


def arguments_of_keys(root: type[Any]) -> Mapping[str, frozenset[str]]:
    """Return the arguments that each key sets, by dotted path; keys that stand in for others included."""
    found: dict[str, frozenset[str]] = {}
    for name, info in argument_keys(root).items():
        for path in filter(None, (info.path, info.otherwise)):
            found[path] = found.get(path, frozenset()) | {name}
    return found


def key_in_force(config: Any, info: KeyInfo) -> str:
    """Return the dotted path of the key that sets an argument in this run."""
    if info.otherwise and get_value(config, info.path) is None:
        return info.otherwise
    return info.path


def argument_values(config: Any) -> dict[str, Any]:
    """Return the values of the arguments that the keys of a configuration, or of a block of it, set."""
    return {
        name: get_value(config, key_in_force(config, info))
        for name, info in argument_keys(type(config)).items()
    }
