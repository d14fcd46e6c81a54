"""Exactness is two facts, and `rollout.exact` asks for both.

Batch-invariant kernels: a request's bits are its own. This is settled once, after the models are built and
before the first step, and holds for the whole run:

    keys, roles ──no_batch_invariance──► each replica's self-check ──► one mode on the actor and all replicas

Rollout log-probs taken as old ones, for rows whose tokens all carry the actor's version. A difference under
`auto` ends this, and leaves the kernels as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from hybridflow.config import PPOConfig
from hybridflow.config.layout import inexact_ranks
from hybridflow.config.needs import longest_row
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.errors import ConfigError
from hybridflow.models.exact_mode import ExactMode
from hybridflow.trainer.ppo.columns import find_estimators
from hybridflow.trainer.roles.roles import Roles
from hybridflow.workers import ActorWorker, ReferenceWorker, RolloutWorker

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.exact"
AUTO_LENGTH = 256
"""Tokens of prompt and response up to which `auto` takes it: attention costs more than the pass that is saved
beyond.
"""


@dataclass
class ExactState:
    """The two facts of a run; a checkpoint keeps whether a difference has ended the second."""

    batch_invariant: bool = False
    """Whether actor and replicas compute a row to the same bits in whatever batch; it never changes in a run.
    """
    may_reuse: bool = True
    """Whether the rollout's log-probs can save the pass at all, by the run's keys."""
    reuse_ended: bool = False
    """True after a difference under `auto`: this run computes old log-probs, after a resume too."""

    @property
    def reuses(self) -> bool:
        """Whether the rollout's log-probs are the actor's, to the bit, in rows of the actor's version."""
        return self.batch_invariant and self.may_reuse and not self.reuse_ended

    def state_dict(self) -> dict[str, bool]:
        """Return the state for a checkpoint; the kernels are chosen again in each process."""
        return {"ended": self.reuse_ended}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Load the state of a checkpoint."""
        self.reuse_ended = state["ended"]


def settle_exact(config: PPOConfig, roles: Roles, state: ExactState) -> ExactMode | None:
    """Switch the actor and the rollout to batch-invariant kernels where `rollout.exact` asks for them and
    they hold; return the mode, None where they stay as they are.

    With `rollout.exact=true` ConfigError is raised with the reason if they do not hold; with `auto` the
    reason is logged.
    """
    wanted = config.actor_rollout_ref.rollout.exact
    if wanted is False:
        return None
    no_reuse = _no_reuse(config)
    impossible = no_batch_invariance(config, roles)
    if config.trainer.schedule not in EXACT_SCHEDULES:  # these want the kernels for the timing's sake
        impossible = impossible or no_reuse
    chosen = impossible or _choose(config, roles)
    if isinstance(chosen, str):
        if wanted is True:
            raise ConfigError(f"{KEY}=true cannot hold: {chosen}. Set {KEY}=auto or false")
        logger.info("fast mode: %s", chosen)
        return None
    roles.actor.call_list(ActorWorker.set_exact, chosen)
    roles.rollout.call_list(RolloutWorker.set_exact, chosen)
    if roles.reference is not None:
        roles.reference.call(ReferenceWorker.keep_prompts_apart)
    state.batch_invariant = True
    state.may_reuse = no_reuse is None
    if wanted is True:
        state.reuse_ended = False  # requested, it is tried again
    logger.debug(
        "exact mode pads keys of attention to %d and dense layers to %d rows",
        chosen.key_step,
        chosen.num_rows(1),
    )
    if no_reuse is not None:
        logger.info("exact mode: a request's log-probs are the same in whatever batch it is generated")
        return chosen
    if state.reuse_ended:
        logger.info(
            "exact mode: before the checkpoint that this run goes on from, log-probs of rollout and training "
            "differed, so old log-probs are still computed"
        )
        return chosen
    logger.info(
        "exact mode: generation and training give a token the same log-prob to the bit here, so the pass "
        "that would recompute old log-probs is left out"
    )
    return chosen


def no_batch_invariance(config: PPOConfig, roles: Roles) -> str | None:
    """Return the reason batch-invariant kernels are impossible for this run, or None."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "native":
        return (
            f"actor_rollout_ref.rollout.name={rollout.name} has kernels of its own; only native "
            "generates with the module that trains"
        )
    reason = inexact_ranks(config)
    if reason is not None:
        return reason
    if rollout.exact == "auto" and roles.actor.world_size > 1:
        return f"the actor has {roles.actor.world_size} ranks: {KEY}=true tries it with several"
    if rollout.quantization is not None:
        return f"actor_rollout_ref.rollout.quantization={rollout.quantization} rounds the weights"
    if config.actor_rollout_ref.model.lora_dropout:
        return "actor_rollout_ref.model.lora_dropout changes the log-probs of updates"
    if config.actor_rollout_ref.actor.use_prefix_grouper:
        return (
            "actor_rollout_ref.actor.use_prefix_grouper computes a prompt once for all its rows, which "
            "changes the last bits"
        )
    return None


def _no_reuse(config: PPOConfig) -> str | None:
    """Return the reason the rollout's log-probs cannot save a pass, or under `auto` save too little."""
    rollout = config.actor_rollout_ref.rollout
    longest, keys = longest_row(config)
    if config.trainer.schedule not in (*EXACT_SCHEDULES, "sync") and config.trainer.async_.run_ahead:
        return f"trainer.schedule={config.trainer.schedule} trains rows of older weights, which need the pass"
    if rollout.skip.enable:
        return "actor_rollout_ref.rollout.skip reads rollouts of other weights than the actor's"
    if config.algorithm.rollout_correction.bypass_mode:
        return "algorithm.rollout_correction.bypass_mode takes the rollout's log-probs as they are"
    if config.actor_rollout_ref.actor.router_replay.mode == "R2":
        return "actor_rollout_ref.actor.router_replay.mode=R2 records routes in the pass"
    if not rollout.do_sample and rollout.temperature != 1.0:
        return (
            "greedy tokens have log-probs at temperature 1, and training computes them at "
            f"{rollout.temperature}: set temperature=1"
        )
    for each in find_estimators(config.algorithm).values():
        if rollout.exact == "auto" and "sum_pi_squared" in each.needs:
            return f"the estimator {each.name} needs the pass that exact mode saves"
    if rollout.exact == "auto" and longest > AUTO_LENGTH:
        return (
            f"a row may have {keys} tokens, and {KEY}=auto takes up to {AUTO_LENGTH}, beyond which it "
            "costs more than it saves"
        )
    return None


def _choose(config: PPOConfig, roles: Roles) -> ExactMode | str:
    """Return the mode that all replicas can hold, each by its own self-check, or the reason one cannot."""
    temperature = config.actor_rollout_ref.rollout.temperature
    found = roles.rollout.call_list(
        RolloutWorker.choose_exact, longest=longest_row(config)[0], temperature=temperature
    )
    for rank, mode in enumerate(found):
        if isinstance(mode, str):
            if len(found) == 1:
                return mode
            return f"{mode} (rollout rank {rank})"
    return reduce(ExactMode.joined, (mode for mode in found if isinstance(mode, ExactMode)))
