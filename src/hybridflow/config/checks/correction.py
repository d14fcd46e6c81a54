"""The checks of `algorithm.rollout_correction`; the syntax of its thresholds is in `thresholds.py`."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.needs import estimator_facts, loss_facts
from hybridflow.config.root import PPOConfig
from hybridflow.config.thresholds import parse_is_threshold, read_rejection
from hybridflow.errors import ConfigError

PATH = "algorithm.rollout_correction"


def correction_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each part of a run that bypass mode excludes."""
    correction = config.algorithm.rollout_correction
    estimator = estimator_facts(config)
    if correction.bypass_mode and estimator is not None and estimator.actor_pass:
        yield (
            f"{PATH}.bypass_mode=true leaves out the actor's pass over the batch, and "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs Σπ² from it: set "
            f"{PATH}.bypass_mode=false, or another estimator, for example rloo"
        )
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    facts = loss_facts(config)
    unweighted = correction.bypass_mode and correction.rollout_is and correction.loss_type == "ppo_clip"
    if unweighted and facts is not None and not facts.has_ratio:
        yield (
            f"{PATH}.rollout_is={correction.rollout_is} with bypass_mode=true and loss_type=ppo_clip leaves "
            f"the weights to the ratio of the loss, and actor_rollout_ref.actor.policy_loss.loss_mode={loss} "
            f"has none: set {PATH}.loss_type=reinforce, or bypass_mode=false"
        )


def uncorrected(config: PPOConfig, why: str) -> Iterator[str]:
    """Yield a line if nothing corrects for the policy that sampled; `why` says that it is another one."""
    correction = config.algorithm.rollout_correction
    if not (correction.corrects or correction.bypass_mode):
        yield (
            f"{why}, and nothing corrects for the policy that sampled them. Set one of "
            f"{PATH}.rollout_is=token (or sequence: the loss is weighted by the ratio of the policy at "
            "the start of the step to the one that sampled: decoupled PPO), "
            f"{PATH}.rollout_rs=token_k1 with rollout_rs_threshold (tokens or rows whose ratio is off "
            f"are left out), or {PATH}.bypass_mode=true (the policy that sampled is the old policy of "
            "the loss, which saves a pass over the batch)"
        )
        return
    facts = loss_facts(config)
    weighted = correction.rollout_is and correction.loss_type == "reinforce"
    if correction.bypass_mode and facts and not (facts.has_ratio or weighted or correction.rollout_rs):
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        yield (
            f"{why}, and {PATH}.bypass_mode=true leaves the correction to the ratio of the loss, "
            f"which actor_rollout_ref.actor.policy_loss.loss_mode={loss} does not have: set "
            f"{PATH}.bypass_mode=false with rollout_is=token, or a loss with a ratio"
        )


def thresholds(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each threshold or option that does not parse, or does not fit the others."""
    correction = config.algorithm.rollout_correction
    try:
        parse_is_threshold(correction.rollout_is_threshold)
    except ConfigError as error:
        yield str(error)
    if correction.rollout_rs is not None:
        yield from read_rejection(correction.rollout_rs, correction.rollout_rs_threshold)[1]


def correction_notes(config: PPOConfig) -> Iterator[str]:
    """Yield one line for weights that bypass mode does not use."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is:
        yield (
            f"{PATH}.rollout_is={correction.rollout_is} is not used by {PATH}.loss_type=ppo_clip: in bypass "
            "mode its ratio is already that of the policy to the rollout; loss_type=reinforce uses the "
            "weights"
        )
