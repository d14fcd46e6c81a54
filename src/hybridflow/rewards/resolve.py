"""The function that the `reward.*` keys choose: a sum of terms, the user's, or a built-in one."""

from __future__ import annotations

from hybridflow.config.checks.reward import CUSTOM, reward_problems
from hybridflow.config.convert import raise_all
from hybridflow.config.own_code import CALLED_WITH, CALLED_WITH_LISTS, DEFAULT_NAMES
from hybridflow.config.reward import RewardConfig
from hybridflow.config.source_code import in_memory, shown
from hybridflow.rewards.compose import compose, load_terms
from hybridflow.rewards.load import (
    is_path,
    load_builtin,
    load_user_function,
)
from hybridflow.rewards.managers import BATCH
from hybridflow.rewards.run_programs import build_runner
from hybridflow.rewards.table import RewardFunction


def resolve(config: RewardConfig, seed: int) -> RewardFunction:
    """Load the reward function that the configuration chooses.

    Raises ConfigError for a choice that cannot be loaded, RewardError if a built-in one needs an extra that
    is not installed.
    """
    raise_all(list(reward_problems(config)))  # a run from the command line was checked for this before
    custom = config.custom_reward_function
    runner = build_runner(config)
    if config.terms:
        return compose(load_terms(config.terms, seed, runner))
    if custom.path:
        names = CALLED_WITH
        if config.manager == BATCH:
            names = CALLED_WITH_LISTS
        options = dict(custom.reward_kwargs)
        return load_user_function(custom.path, custom.name, options, key=CUSTOM, called_with=names)
    if is_path(config.function):
        return load_user_function(
            config.function, DEFAULT_NAMES[0], dict(custom.reward_kwargs), key="reward.function"
        )
    return load_builtin(config.function, dict(custom.reward_kwargs), seed, runner, key="reward.function")


def describe(config: RewardConfig) -> str:
    """Describe the chosen function in a few words, for messages."""
    if config.terms:
        return "reward.terms " + " + ".join(shown(str(term.get("name"))) for term in config.terms)
    custom = config.custom_reward_function
    if custom.path:
        if ":" in custom.path:
            return custom.path
        return f"{custom.path}:{custom.name}"
    if in_memory(config.function):
        return f"the reward function {shown(config.function)}"
    return f"reward.function={config.function}"


def has_file(config: RewardConfig) -> bool:
    """Whether a command could load the chosen function: it is built in, or of a file or a module."""
    return not any(
        in_memory(str(name)) for name in [config.function, *(term.get("name") for term in config.terms)]
    )
