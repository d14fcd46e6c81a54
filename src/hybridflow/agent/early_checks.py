"""Checks of the user's environment, tools, interactions and agent, before torch is loaded.

keys ──load the files that they name──► ConfigError, or nothing; no object is made and no process started
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.own_code import agent_faults
from hybridflow.config.source_code import definition_of
from hybridflow.data.plugin import check_signature, load_class, load_entries, load_object
from hybridflow.environments.load import load_environment
from hybridflow.errors import ConfigError
from hybridflow.interactions.environment import load_interactions
from hybridflow.tools.tool_config import load_functions, read_entries

AGENT_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop (or a row's agent_name)"
COMMAND_KEY = "actor_rollout_ref.rollout.agent.command"
PATH_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
LOOPS = "hybridflow.agent.agent_loop"
LOOP_FORM = "run(self, sampling_params, **kwargs)"


def check_agents(config: PPOConfig) -> None:
    """Raise ConfigError where the user's code that the keys name does not load, or is of another form."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    agent = config.actor_rollout_ref.rollout.agent
    if config.data.environment:
        load_environment(config.data.environment, config.data.environment_options)
    if multi_turn.function_tool_path:
        load_functions(multi_turn.function_tool_path)
    if multi_turn.tool_config_path:
        list(read_entries(multi_turn.tool_config_path))
    if multi_turn.interaction_config_path:
        load_interactions(multi_turn.interaction_config_path)
    for entry in agent_entries(agent.agent_loop_config_path).values():
        load_class(entry["_target_"], key=PATH_KEY, methods={LOOP_FORM: ("self", "sampling_params")})
    if ":" in agent.default_agent_loop:
        found = load_object(agent.default_agent_loop, key=AGENT_KEY)
        check_agent(found, agent.default_agent_loop, agent.options)
    if agent.command and shutil.which(agent.command[0]) is None:
        raise ConfigError(
            f"{COMMAND_KEY}: there is no command {agent.command[0]!r} (looked in PATH and {Path.cwd()})"
        )


def check_agent(found: Any, name: str, options: dict[str, Any]) -> None:
    """Raise ConfigError for what is neither a function `run(base_url, row)` nor a class of agents or loops.

    `options` are keyword arguments of a class of agents.
    """
    whose = f"{AGENT_KEY}: {name}"
    if not callable(found):
        raise ConfigError(f"{whose} names a {type(found).__name__}, wanted a function or a class")
    if any(base.__module__ == LOOPS for base in getattr(found, "__mro__", ())):
        check_signature(found.run, f"async def {LOOP_FORM}", ("self", "sampling_params"), whose=whose)
        return
    for fault in agent_faults(name, definition_of(found), options):
        raise ConfigError(f"{AGENT_KEY}: {fault}")


def agent_entries(path: str | None) -> dict[str, dict[str, Any]]:
    """Return the entries of a YAML file, [{name, _target_, …}], by name and without it."""
    if path is None:
        return {}
    entries = load_entries(path, None, "_target_", key=PATH_KEY)
    if any("name" not in entry for entry in entries):
        raise ConfigError(f"{PATH_KEY}: {path} has entries without a name")
    return {str(entry.pop("name")): entry for entry in entries}
