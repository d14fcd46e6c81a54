"""The numbers of a run that the functions of the maths take, each with the key that sets it.

PPOConfig ──Run──► Number(symbols, value, key) for an argument of an estimator or a loss
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridflow.config import PPOConfig
from hybridflow.config.tree import keys_of
from hybridflow.explain.formula import Formula, Number, formula_of, paragraphs, shown

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PRM = "reward.process_reward_model"


class Parameter(NamedTuple):
    """How equations write an argument, and its keys: the first that is not null is in force."""

    symbols: tuple[str, ...]
    keys: tuple[str, ...]


PARAMETERS: dict[str, Parameter] = {
    "gamma": Parameter(("γ",), ("algorithm.gamma",)),
    "lam": Parameter(("λ",), ("algorithm.lam",)),
    "lam_critic": Parameter(("λ_critic",), ("algorithm.lam_critic", "algorithm.lam")),
    "lam_length_alpha": Parameter(("α",), ("algorithm.lam_length_alpha",)),
    "norm_by_std": Parameter((), ("algorithm.norm_adv_by_std_in_grpo",)),
    "gdpo_reward_weights": Parameter(("w",), ("algorithm.gdpo_reward_weights",)),
    "process_coef": Parameter(("c_p",), (f"{PRM}.process_coef",)),
    "outcome_coef": Parameter(("c_o",), (f"{PRM}.outcome_coef",)),
    "sppo_eta": Parameter(("η",), ("algorithm.sppo.eta",)),
    "sppo_beta": Parameter(("β",), ("algorithm.sppo.beta",)),
    "clip_low": Parameter(("ε_low", "δ_low"), (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio")),
    "clip_high": Parameter(("ε_high", "δ_high"), (f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio")),
    "clip_c": Parameter(("c",), (f"{ACTOR}.clip_ratio_c",)),
    "tau_pos": Parameter(("τ_pos",), (f"{ACTOR}.policy_loss.tau_pos",)),
    "tau_neg": Parameter(("τ_neg",), (f"{ACTOR}.policy_loss.tau_neg",)),
    "clip_cov_ratio": Parameter(("ratio",), (f"{ACTOR}.policy_loss.clip_cov_ratio",)),
    "clip_cov_lb": Parameter(("lb",), (f"{ACTOR}.policy_loss.clip_cov_lb",)),
    "clip_cov_ub": Parameter(("ub",), (f"{ACTOR}.policy_loss.clip_cov_ub",)),
    "kl_cov_ratio": Parameter(("ratio",), (f"{ACTOR}.policy_loss.kl_cov_ratio",)),
    "ppo_kl_coef": Parameter(("coef",), (f"{ACTOR}.policy_loss.ppo_kl_coef",)),
    "dro_beta": Parameter(("β",), (f"{ACTOR}.policy_loss.dro_beta",)),
    "dpo_loss": Parameter((), (f"{ACTOR}.policy_loss.dpo_loss",)),
    "dpo_beta": Parameter(("β",), (f"{ACTOR}.policy_loss.dpo_beta",)),
    "dpo_label_smoothing": Parameter((), (f"{ACTOR}.policy_loss.dpo_label_smoothing",)),
}
"""Arguments of estimators and losses by name; `trainer/ppo/columns.py` and
`workers/losses.py` hand them over under the same names."""


class Run:
    """A configuration read by dotted keys, so that every number can say where it is set."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.keys = keys_of(PPOConfig)

    def __getitem__(self, key: str) -> Any:
        return functools.reduce(getattr, key.split("."), self.config)

    def number(self, symbols: tuple[str, ...], *keys: str) -> Number:
        """Return the number of the first of `keys` that is not null, or of the first."""
        key = next((key for key in keys if self[key] is not None), keys[0])
        return Number(symbols, self[key], key, self.keys[key].meaning)

    def says(self, key: str) -> str:
        """Return `key=value` with the key's meaning."""
        return f"{key}={shown(self[key])}: {self.keys[key].meaning}"

    def arguments(self, function: Callable[..., Any], options_key: str) -> list[Number]:
        """Return the numbers that an estimator or a loss takes: by the table, by its own defaults, by the
        user's options.
        """
        named = inspect.signature(inspect.unwrap(function)).parameters
        options = self[options_key]
        found: list[Number] = []
        adapts_lam = "lam_length_alpha" in named and self["algorithm.lam_length_alpha"] is not None
        for name, argument in named.items():
            if name in options:
                continue
            if name in PARAMETERS:
                symbols, keys = PARAMETERS[name]
                if name == "lam" and adapts_lam:
                    symbols = ()  # the equation's λ then depends on the length
                found.append(self.number((*symbols, name), *keys))
            elif isinstance(argument.default, (bool, int, float)):
                found.append(Number((name,), argument.default, "its own default"))
        for name, value in options.items():
            symbols = ()
            if name in PARAMETERS:
                symbols = PARAMETERS[name].symbols
            found.append(Number((*symbols, name), value, f"{options_key}.{name}"))
        return found

    def formula(
        self,
        function: Callable[..., Any],
        options_key: str,
        *,
        more: tuple[Number, ...] = (),
        own: bool = False,
    ) -> Formula:
        """Return the formula of an estimator or a loss; its notes are the paragraphs on optional arguments
        that this run sets.
        """
        numbers = self.arguments(function, options_key)
        set_here = [
            name
            for name, argument in inspect.signature(inspect.unwrap(function)).parameters.items()
            if argument.default is None
        ]
        set_here = [name for name in set_here if name in PARAMETERS and self[PARAMETERS[name].keys[0]]]
        texts = paragraphs(function)[1:]
        notes = tuple(text for text in texts if own or any(f"`{name}`" in text for name in set_here))
        return formula_of(function, [*numbers, *more], notes=notes, own=own)
