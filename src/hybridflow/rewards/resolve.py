"""From the `reward.*` keys to the function that scores rows: a sum of terms, the user's function, or a
built-in.
"""

from __future__ import annotations

from hybridflow.config.checks.reward import CUSTOM, reward_problems
from hybridflow.config.convert import raise_all
from hybridflow.config.reward import RewardConfig
from hybridflow.rewards.compose import compose, load_terms
from hybridflow.rewards.load import DEFAULT_NAMES, is_path, load_builtin, load_user_function
from hybridflow.rewards.table import RewardFunction


def check_choice(config: RewardConfig) -> None:
    """Raise ConfigError if the keys choose more than one reward function.

    A run from the command line is checked for this before it begins.
    """
    raise_all(list(reward_problems(config)))


def resolve(config: RewardConfig, seed: int) -> RewardFunction:
    """Load the reward function that the configuration chooses.

    Raises ConfigError for a choice that cannot be loaded, RewardError if a built-in one needs an extra that
    is not installed.
    """
    check_choice(config)
    custom = config.custom_reward_function
    if config.terms:
        return compose(load_terms(config.terms, seed))
    if custom.path:
        return load_user_function(custom.path, custom.name, dict(custom.reward_kwargs), key=CUSTOM)
    if is_path(config.function):
        return load_user_function(
            config.function, DEFAULT_NAMES[0], dict(custom.reward_kwargs), key="reward.function"
        )
    return load_builtin(config.function, dict(custom.reward_kwargs), seed, key="reward.function")


def describe(config: RewardConfig) -> str:
    """Describe the chosen function in a few words, for messages."""
    if config.terms:
        return "reward.terms " + " + ".join(str(term.get("name")) for term in config.terms)
    custom = config.custom_reward_function
    if custom.path:
        if ":" in custom.path:
            return custom.path
        return f"{custom.path}:{custom.name}"
    return f"reward.function={config.function}"
