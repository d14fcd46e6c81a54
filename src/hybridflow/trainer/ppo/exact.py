"""The decision whether a run is in exact mode, taken once, after the models are built and before the first
step.

keys, roles ──ruled_out──► each replica's self-check ──► one mode on the actor and all replicas, or the reason
why not
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from hybridflow.config import PPOConfig
from hybridflow.errors import ConfigError
from hybridflow.models.exact import ExactMode
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.exact import ExactRollout

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.exact"
AUTO_LENGTH = 256
"""Tokens of prompt and response up to which `auto` takes it: attention costs more than the pass that is saved
beyond.
"""


@dataclass
class ExactState:
    """The exact mode of a run; a checkpoint keeps whether a difference has ended it."""

    on: bool = False
    ended: bool = False
    """True after a difference under `auto`: this run stays in fast mode, after a resume too."""

    def state_dict(self) -> dict[str, bool]:
        """Return what a checkpoint keeps; whether the mode is on is decided anew in each process."""
        return {"ended": self.ended}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Load what a checkpoint has kept."""
        self.ended = state["ended"]

    def end(self, roles: Roles) -> None:
        """End exact mode: the run continues in fast mode."""
        self.on = False
        self.ended = True
        switch_to(roles, None)


def settle_exact(config: PPOConfig, roles: Roles, state: ExactState) -> None:
    """Switch the actor and the rollout to exact mode where `rollout.exact` asks for it and it holds.

    With `rollout.exact=true` ConfigError is raised with the reason if it does not hold; with `auto` the
    reason is logged.
    """
    wanted = config.actor_rollout_ref.rollout.exact
    if wanted is False:
        return
    chosen = _ruled_out(config, roles, state) or _choose(config, roles)
    if isinstance(chosen, str):
        if wanted is True:
            raise ConfigError(f"{KEY}=true cannot hold: {chosen}. Set {KEY}=auto or false")
        logger.info("fast mode: %s", chosen)
        return
    switch_to(roles, chosen)
    state.on = True
    logger.debug(
        "exact mode pads keys of attention to %d and dense layers to %d rows",
        chosen.key_step,
        chosen.num_rows(1),
    )
    logger.info(
        "exact mode: generation and training give a token the same log-prob to the bit here, so the pass "
        "that would recompute old log-probs is left out"
    )


def switch_to(roles: Roles, mode: ExactMode | None) -> None:
    """Compute in this mode from now on, on the actor and all replicas; None means fast mode."""
    roles.actor.call_list(ActorWorker.set_exact, mode)
    roles.rollout.call_list(ExactRollout.set_exact, mode)


def _ruled_out(config: PPOConfig, roles: Roles, state: ExactState) -> str | None:
    """Return the reason exact mode is impossible for this run, or not worth it under `auto`; None if there is
    none.
    """
    rollout = config.actor_rollout_ref.rollout
    longest = _longest(config)
    if rollout.name != "native":
        return (
            f"actor_rollout_ref.rollout.name={rollout.name} has kernels of its own; only native "
            "generates with the module that trains"
        )
    if roles.actor.world_size > 1:
        return (
            f"the actor is spread over {roles.actor.world_size} ranks, which compute with parts of the model"
        )
    if rollout.tensor_model_parallel_size > 1:
        return (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} "
            "sums partial products"
        )
    if config.actor_rollout_ref.actor.use_prefix_grouper:
        return (
            "actor_rollout_ref.actor.use_prefix_grouper computes a prompt once for all its rows, which "
            "changes the last bits"
        )
    if config.algorithm.rollout_correction.bypass_mode:
        return "algorithm.rollout_correction.bypass_mode takes the rollout's log-probs as they are"
    if not rollout.do_sample and rollout.temperature != 1.0:
        return (
            "greedy tokens have log-probs at temperature 1, and training computes them at "
            f"{rollout.temperature}: set temperature=1"
        )
    if rollout.exact == "auto" and state.ended:
        return (
            "before the checkpoint that this run goes on from, log-probs of rollout and training "
            "differed in exact mode"
        )
    if rollout.exact == "auto" and "sum_pi_squared" in find_estimator(config.algorithm).needs:
        return (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs the pass that exact mode saves"
        )
    if rollout.exact == "auto" and longest > AUTO_LENGTH:
        return (
            f"data.max_prompt_length + max_response_length = {longest} tokens, and {KEY}=auto takes up to "
            f"{AUTO_LENGTH}, beyond which it "
            "costs more than it saves"
        )
    return None


def _choose(config: PPOConfig, roles: Roles) -> ExactMode | str:
    """Return the mode that all replicas can hold, each by its own self-check, or the reason one cannot."""
    temperature = config.actor_rollout_ref.rollout.temperature
    found = roles.rollout.call_list(
        ExactRollout.choose_exact, longest=_longest(config), temperature=temperature
    )
    for rank, mode in enumerate(found):
        if isinstance(mode, str):
            if len(found) == 1:
                return mode
            return f"{mode} (rollout rank {rank})"
    return reduce(ExactMode.joined, (mode for mode in found if isinstance(mode, ExactMode)))


def _longest(config: PPOConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length
