"""The checks of agents, tools and environments, as far as the keys alone can tell."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.checks.paths import plugin_problem
from hybridflow.config.needs import estimator_facts, uses_agents
from hybridflow.config.paths import local
from hybridflow.config.root import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"


def agent_notes(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each key of agents that is set and has no effect."""
    rollout = config.actor_rollout_ref.rollout
    keys = rollout.multi_turn
    agent = rollout.agent
    chosen = {
        f"{ROLLOUT}.agent.command": agent.command,
        f"{ROLLOUT}.agent.default_agent_loop": agent.default_agent_loop != "single_turn_agent",
        "data.environment": config.data.environment,
        f"{ROLLOUT}.multi_turn.enable": keys.enable,
    }
    asked = [key for key, value in chosen.items() if value]
    if len(asked) > 1:
        yield f"{asked[0]} says which agent plays rows without an agent_name; {', '.join(asked[1:])} do not"
    tools = keys.tool_config_path or keys.function_tool_path
    if tools and not keys.enable and not config.data.environment:
        yield (
            f"tools ({tools}) are used by rows whose agent_name is tool_agent; for all rows set "
            f"{ROLLOUT}.multi_turn.enable=true"
        )
    if keys.interaction_config_path and config.data.environment:
        yield f"{ROLLOUT}.multi_turn.interaction_config_path: not read by rows that data.environment plays"


def agent_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of the keys of agents."""
    rollout = config.actor_rollout_ref.rollout
    yield from plugin_problem("data.environment", config.data.environment)
    agent = rollout.agent
    others = agent.command or agent.default_agent_loop != "single_turn_agent"
    if config.data.environment and not others and config.reward.reward_model.enable:
        yield (
            f"reward.reward_model.enable=true with data.environment={config.data.environment}, which gives "
            "the rewards itself: the reward model would never be asked. Set reward.reward_model.enable=false "
            "or leave data.environment out"
        )
    yield from plugin_problem(f"{ROLLOUT}.agent.default_agent_loop", agent.default_agent_loop)
    files = {
        f"{ROLLOUT}.multi_turn.tool_config_path": rollout.multi_turn.tool_config_path,
        f"{ROLLOUT}.multi_turn.interaction_config_path": rollout.multi_turn.interaction_config_path,
        f"{ROLLOUT}.agent.agent_loop_config_path": agent.agent_loop_config_path,
    }
    for key, file in files.items():
        if file and not local(file).is_file():
            yield f"{key}: there is no file {file}"
    functions = rollout.multi_turn.function_tool_path
    if functions and functions.endswith(".py") and not local(functions).is_file():
        yield f"{ROLLOUT}.multi_turn.function_tool_path: there is no file {functions}"
    estimator = estimator_facts(config)
    if uses_agents(config) and estimator is not None and estimator.demonstration_rows:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} learns from the data's own answers of "
            "one turn, and agents have several: choose another estimator, such as grpo"
        )
