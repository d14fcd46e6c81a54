"""The checks of agents, tools and environments, as far as the keys alone can tell."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.checks.paths import local, plugin_problem
from hybridflow.config.needs import estimator_facts, uses_agents
from hybridflow.config.root import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"


def agent_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of the keys of agents."""
    rollout = config.actor_rollout_ref.rollout
    yield from plugin_problem("data.environment", config.data.environment)
    agent = rollout.agent
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
    if agent.min_group_size > rollout.n:
        yield (
            f"{ROLLOUT}.agent.min_group_size={agent.min_group_size} is more than {ROLLOUT}.n={rollout.n}, "
            "so no group would ever be trained: set it lower"
        )
    estimator = estimator_facts(config)
    if uses_agents(config) and estimator is not None and estimator.demonstration_rows:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} learns from the data's own answers of "
            "one turn, and agents have several: choose another estimator, such as grpo"
        )
