"""Rules about healthy runs that could be faster. They speak only where no alarm does."""

from __future__ import annotations

from hybridflow.observability.advice.alarms import ACTOR, ROLLOUT
from hybridflow.observability.advice.history import Advice, History, Rule

MAX_IDLE = 0.5
MAX_PREEMPTED = 0.1
"""Preemptions for each request."""
MIN_PREFIX_HITS = 0.1
MIN_MFU = 0.15


def idle_rollout(run: History) -> Advice | None:
    """Find devices that wait for the other half of the run."""
    generating = run.recent("fully_async/rollouter/idle_ratio")
    training = run.recent("fully_async/trainer/idle_ratio")
    if generating is not None and generating > MAX_IDLE:
        return Advice(
            "idle",
            f"the engines had nothing to generate for {generating:.0%} of the time: let them run further "
            "ahead, or give the trainer more devices",
            ("trainer.async.run_ahead", "trainer.resource_pools"),
        )
    if training is not None and training > MAX_IDLE:
        return Advice(
            "idle",
            f"the trainer waited for rollouts for {training:.0%} of the time: give generation more devices",
            ("trainer.resource_pools", "trainer.async.max_concurrent_groups"),
        )
    return None


def cache_thrash(run: History) -> Advice | None:
    """Find a cache of keys and values that is too small, or that conversations do not come back to."""
    requests = run.now.get("rollout/requests", 0.0)
    preempted = run.now.get("rollout/preemptions", 0.0)
    if requests and preempted > MAX_PREEMPTED * requests:
        return Advice(
            "cache",
            f"{preempted:.0f} of {requests:.0f} requests were preempted because the cache of keys and "
            "values was full, and their tokens were computed again: give it more memory, or run fewer rows",
            (f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.max_num_seqs"),
        )
    hits = run.recent("rollout/prefix_hit_ratio")
    turns = run.recent("agent/num_turns/mean")
    if hits is None or turns is None or turns < 2 or hits >= MIN_PREFIX_HITS:
        return None
    return Advice(
        "cache",
        f"conversations of {turns:.1f} turns find only {hits:.0%} of their tokens in the cache: keep what "
        "was computed, and give it memory",
        (f"{ROLLOUT}.enable_prefix_caching", f"{ROLLOUT}.gpu_memory_utilization"),
    )


def low_mfu(run: History) -> Advice | None:
    """Find updates that use little of the devices."""
    used = run.recent("perf/mfu/actor")
    if used is None or used >= MIN_MFU:
        return None
    return Advice(
        "mfu",
        f"updates of the actor use {used:.0%} of what the devices can compute: put more tokens into a "
        "forward pass, or shard over fewer ranks",
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.fsdp_config.fsdp_size"),
    )


HINTS: tuple[Rule, ...] = (idle_rollout, cache_thrash, low_mfu)
