"""Loads environments by name.

"guess", or "path/to/file.py:Guess", with options ──► a factory without arguments ──► one object a trajectory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hybridflow.config.own_code import environment_faults
from hybridflow.config.source_code import definition_of
from hybridflow.data.plugin import blaming, check_signature, load_object
from hybridflow.environments.base import Environment
from hybridflow.errors import ConfigError
from hybridflow.tools.base import checked_after_loss
from hybridflow.tools.function_tool import mark_of, tool_methods

ENVIRONMENTS = {
    "adventure": "hybridflow.environments.built_in:Adventure",
    "calculator": "hybridflow.environments.built_in:Calculator",
    "guess": "hybridflow.environments.built_in:Guess",
    "reasoning_gym": "hybridflow.environments.reasoning_gym:ReasoningGym",
    "remote": "hybridflow.environments.remote:RemoteEnvironment",
    "search": "hybridflow.environments.built_in:Search",
    "world": "hybridflow.environments.remote:World",
}
"""Built-in environments, each imported when it is asked for."""
_MADE: dict[type[Any], type[Environment]] = {}


def load_environment(
    spec: str, options: Mapping[str, Any] | None = None, *, key: str = "data.environment"
) -> Callable[[], Environment]:
    """Load a built-in environment, or a class as "path/to/file.py:Name" or "package.module:Name".

    A class that is no Environment but has `reset` and `step` is accepted too. `options` are arguments of the
    constructor, which the factory calls. Raises ConfigError for an unknown name, for what is no environment,
    for methods of another form, and for options that the constructor does not take; `key` is the
    configuration key to name.
    """
    options = dict(options or {})
    if ":" not in spec and spec not in ENVIRONMENTS:
        raise ConfigError(
            f"{key}: got {spec!r}, wanted one of {', '.join(ENVIRONMENTS)}, or path/to/file.py:Name or "
            "package.module:Name"
        )
    found = load_object(ENVIRONMENTS.get(spec, spec), key=key)
    for fault in environment_faults(spec, definition_of(found), options, f"{key}_options"):
        raise ConfigError(f"{key}: {fault}")
    methods = tool_methods(found)  # one without a schema is refused
    can_ask = hasattr(found, "outcome")
    if can_ask:
        form = "def outcome(self, call_id)"
        check_signature(found.outcome, form, ("self", "call_id"), whose=f"{key}: {spec}")
    marks = [mark_of(getattr(found, name)) for name in methods]
    for policy in (getattr(found, "after_loss", None), *(mark.after_loss for mark in marks if mark)):
        if policy is not None:
            checked_after_loss(policy, f"{key}: {spec}", can_ask=can_ask)
    if not issubclass(found, Environment):
        found = _as_environment(found)
    return partial(_construct, found, options, f"{key}: {spec}")


def open_environment(
    spec: str, options: Mapping[str, Any] | None = None, seed: int = 0, step_seed: int = 0
) -> Environment:
    """Return a new environment with its seeds; the factory that a worker process imports by its name."""
    environment = load_environment(spec, options)()
    environment.seed = seed
    environment.step_seed = step_seed
    return environment


def _as_environment(found: type[Any]) -> type[Environment]:
    """Return a subclass with what an Environment has by default; its objects pickle by the class itself."""
    if found not in _MADE:
        words = {"__module__": found.__module__, "__reduce__": _reduce}
        _MADE[found] = type(found.__name__, (found, Environment), words)
    return _MADE[found]


def _reduce(environment: Environment) -> tuple[Any, ...]:
    return _blank, (type(environment).__bases__[0],), environment.__getstate__()


def _blank(found: type[Any]) -> Environment:
    made = _as_environment(found)
    return made.__new__(made)


def _construct(found: type[Environment], options: Mapping[str, Any], whose: str) -> Environment:
    with blaming(whose):
        return found(**options)
