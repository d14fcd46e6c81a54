"""The agents of a user's own, by name.

name ──► entry of a YAML file | loop that `register` has named | path/to/file.py:NAME ──► Agent
"""

from __future__ import annotations

from hybridflow.agent.agent_loop import REGISTERED, AgentLoopAgent, AgentLoopBase
from hybridflow.agent.early_checks import AGENT_KEY, PATH_KEY, agent_entries, check_agent
from hybridflow.agent.episode import Agent
from hybridflow.config import PPOConfig
from hybridflow.data.plugin import blaming, load_class, load_object
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError


def load_agent_loop(name: str, config: PPOConfig, tokenizer: Tokenizer) -> Agent:
    """Return an agent: an entry of `agent_loop_config_path`, or a loop that `register` has named.

    path/to/file.py:NAME (or package.module:NAME) is a class of agent loops, constructed with `agent.options`
    for each trajectory, or a class of agents, constructed once as NAME(tokenizer, **options). ConfigError
    where there is no such agent.
    """
    agent = config.actor_rollout_ref.rollout.agent
    entries = agent_entries(agent.agent_loop_config_path)
    if name in entries:
        kwargs = dict(entries[name])
        target = load_class(kwargs.pop("_target_"), key=PATH_KEY)
        return AgentLoopAgent(target, kwargs, config, tokenizer)
    if name in REGISTERED:
        return AgentLoopAgent(REGISTERED[name], agent.options, config, tokenizer)
    if ":" not in name:
        known = ["single_turn_agent", "tool_agent", "environment", *entries, *REGISTERED]
        raise ConfigError(
            f"{AGENT_KEY}: there is no agent {name!r}; wanted {', '.join(known)} or path/to/file.py:NAME"
        )
    found = load_object(name, key=AGENT_KEY)
    check_agent(found, name, agent.options)
    if issubclass(found, AgentLoopBase):
        return AgentLoopAgent(found, agent.options, config, tokenizer)
    with blaming(f"{AGENT_KEY}: {name}"):
        made: Agent = found(tokenizer, **agent.options)
    return made
