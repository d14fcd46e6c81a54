"""The checks of keys for mixtures of experts, as far as the keys alone can tell."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.root import PPOConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODE = f"{ACTOR}.router_replay.mode"
RECORDS = f"{ROLLOUT}.enable_rollout_routing_replay"


def expert_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of the keys of router replay and of the auxiliary loss."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    mode = actor.router_replay.mode
    records = rollout.enable_rollout_routing_replay
    if records != (mode == "R3"):
        yield (
            f"{MODE}={mode} with {RECORDS}={str(records).lower()}: generation records routes for R3 and for "
            f"nothing else. Set {MODE}=R3 and {RECORDS}=true, or neither"
        )
    if (mode != "disabled" or actor.router_aux_loss_coef) and actor.fsdp_config.use_torch_compile:
        yield (
            f"{MODE}={mode} and {ACTOR}.router_aux_loss_coef={actor.router_aux_loss_coef:g} with "
            f"{ACTOR}.fsdp_config.use_torch_compile=true: a compiled layer does not tell its routes; set "
            "use_torch_compile=false"
        )
    if mode == "R2":
        yield from _without_pass(config)
    if records and config.trainer.num_collectors:
        yield (
            f"{RECORDS}=true with trainer.num_collectors={config.trainer.num_collectors}: collectors do not "
            "keep routes; set trainer.num_collectors=0"
        )


def _without_pass(config: PPOConfig) -> Iterator[str]:
    """Keys that leave out the pass for old log-probs, in which R2 records."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{MODE}=R2, which records in the pass for old log-probs"
    if config.algorithm.rollout_correction.bypass_mode:
        yield (
            f"{key}, with algorithm.rollout_correction.bypass_mode=true, which leaves it out: set {MODE}=R3 "
            "or bypass_mode=false"
        )
    if rollout.reuse_log_probs_within is not None:
        yield (
            f"{key}, with {ROLLOUT}.reuse_log_probs_within={rollout.reuse_log_probs_within:g}, which may "
            f"leave it out: set {MODE}=R3 or reuse_log_probs_within=null"
        )
