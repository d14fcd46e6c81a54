"""The numbers of a run that the functions of the maths take, each with the key that sets it.

PPOConfig ──Run──► Number(name, value, key, symbol) for an argument of an estimator or a loss
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.tree import argument_keys, get_value, key_in_force, keys_of
from hybridflow.explain.formula import Number, shown

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PRM = "reward.process_reward_model"


class Run:
    """A configuration read by dotted keys, so that every number can say where it is set."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.keys = keys_of(PPOConfig)
        self.set_by_keys = argument_keys(PPOConfig)

    def __getitem__(self, key: str) -> Any:
        return get_value(self.config, key)

    def number(self, name: str, key: str, symbol: str = "") -> Number:
        """Return the number that a key sets; without a name it is called by the end of its key."""
        return Number(name or key.rpartition(".")[2], self[key], key, symbol, self.keys[key].meaning)

    def says(self, key: str) -> str:
        """Return `key=value` with the key's meaning."""
        return f"{key}={shown(self[key])}: {self.keys[key].meaning}"

    def arguments(self, names: Iterable[str], options_key: str = "") -> list[Number]:
        """Return the numbers of the arguments with these names that keys set, or the user's options."""
        options = self[options_key] if options_key else {}
        found = []
        for name in names:
            info = self.set_by_keys.get(name)
            if info is not None and name not in options:
                found.append(self.number(name, key_in_force(self.config, info), info.symbol))
        return found + [
            Number(name, value, f"{options_key}.{name}", getattr(self.set_by_keys.get(name), "symbol", ""))
            for name, value in options.items()
        ]

    def own_arguments(self, function: Callable[..., Any], options_key: str) -> list[Number]:
        """Return the numbers that a user's own function takes: by keys, by its defaults, by its options."""
        named = inspect.signature(inspect.unwrap(function)).parameters
        numbers = self.arguments(named, options_key)
        known = {number.name for number in numbers}
        return numbers + [
            Number(name, argument.default, "its own default")
            for name, argument in named.items()
            if name not in known and isinstance(argument.default, (bool, int, float))
        ]
