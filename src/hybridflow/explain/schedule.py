"""The schedule of a run in words: what is generated when, how stale tokens may be, what waits for what.

resolved config ──schedule_lines──► lines for `hybridflow config --explain`
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config import PPOConfig
from hybridflow.config.explain import Line, format_bytes
from hybridflow.config.needs import replayed_steps, rows_per_prompt
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.trainer.schedules.schedule import Schedule

PROMPT_BYTES = 17
"""Bytes of a prompt token in a row: `prompts`, `input_ids` and `attention_mask`."""
RESPONSE_BYTES = 35
"""Bytes of a response token in a row: these, two masks, log-prob, version, call and score."""


def schedule_lines(config: PPOConfig) -> Iterator[Line]:
    """Give the lines on `trainer.schedule`, on collectors, and on rows that are trained again."""
    name = config.trainer.schedule
    yield Line("schedule", name, _generated(config))
    if config.trainer.num_collectors:
        yield Line(
            "groups are played by",
            f"{config.trainer.num_collectors:,} collectors",
            "trainer.num_collectors: processes whose tokens go to the workers past the trainer's process",
        )
    if replayed_steps(config):
        yield from _replay_buffer(config)
    keys = config.trainer.async_
    if name == "sync":
        return
    bound = keys.max_staleness or 0
    every = "every token was sampled by the weights that it trains"
    if bound:
        every = "training steps between the weights that sampled a token and those that it trains"
    yield Line("staleness of a token, at most", f"{bound:,}", f"trainer.async.max_staleness: {every}")
    batch = config.data.train_batch_size
    ahead = Schedule(batch, keys.run_ahead, bound, total_steps=1).groups_ahead
    how = f"data.train_batch_size={batch} × (1 + trainer.async.run_ahead={keys.run_ahead:g})"
    yield Line("groups generated and not yet trained, at most", f"{batch + ahead:,}", how)
    if keys.max_concurrent_groups is not None:
        yield Line(
            "groups generated at once, at most",
            f"{keys.max_concurrent_groups:,}",
            "trainer.async.max_concurrent_groups",
        )
    yield Line("a training step waits for", _step_waits(config), "nothing is dropped for its age")
    yield Line("generation waits for", "a published step", "once as many groups as above are not yet trained")
    yield Line("new weights wait for", *_weights_wait(config))
    if bound:
        yield Line("the loss corrects stale tokens by", *_correction(config))


def _replay_buffer(config: PPOConfig) -> Iterator[Line]:
    """Give the lines on rows that later steps may draw again (PF-PPO)."""
    age = replayed_steps(config)
    held = age * config.data.train_batch_size * rows_per_prompt(config)
    key = f"algorithm.pf_ppo.max_age={age}"
    yield Line(
        "rows of earlier steps that a step may draw, at most",
        f"{held:,}",
        f"{key} batches: every pass reads {age + 1} batches, an update one; "
        "more rows where a trajectory has several",
    )
    response = config.data.max_response_length
    tokens = config.data.max_prompt_length + response
    size = held * (PROMPT_BYTES * (tokens - response) + RESPONSE_BYTES * response)
    yield Line(
        "replay buffer in the driver's memory, at most",
        format_bytes(size),
        f"estimate: rows × ({PROMPT_BYTES} B a prompt token + {RESPONSE_BYTES} B a response token); "
        "a checkpoint has it too",
    )
    yield Line("the loss corrects rows of earlier steps by", *_correction(config))


def _generated(config: PPOConfig) -> str:
    """Return what is generated when."""
    ahead = config.trainer.async_.run_ahead
    return {
        "sync": "a batch is generated between two updates, by the newest weights",
        "one_step_off": "the next batch is generated whole beside training, by the weights before the update",
        "exact_async": f"batches are generated whole beside training, each by the weights of {ahead:g} "
        "training steps before, whatever the timing",
        "fully_async": "groups are generated without a pause beside training, and change to new weights "
        "when they come",
        "colocated_async": "one set of devices takes turns: groups of the next steps are generated while "
        "rewards and environments are waited for",
    }[config.trainer.schedule]


def _step_waits(config: PPOConfig) -> str:
    """Return what has to be there before a training step begins."""
    batch = config.data.train_batch_size
    if config.trainer.schedule in EXACT_SCHEDULES:
        return f"the {batch:,} groups of its own batch"
    return f"{batch:,} scored groups, and for any group that would be too stale in a later step"


def _weights_wait(config: PPOConfig) -> tuple[str, str]:
    """Return what an engine ends before it takes new weights, and the reason."""
    if config.trainer.schedule in EXACT_SCHEDULES:
        return "the groups of their batch", "a response is generated whole under one version"
    key = f"trainer.async.partial_rollout={str(config.trainer.async_.partial_rollout).lower()}"
    if config.trainer.async_.partial_rollout:
        return "the next token", f"{key}: responses go on, and each token carries its version"
    return "all responses that were begun", key


def _correction(config: PPOConfig) -> tuple[str, str]:
    """Return what the loss does about stale tokens, and the keys that ask for it."""
    correction = config.algorithm.rollout_correction
    keys = [
        f"{name}={value}"
        for name, value in (("rollout_is", correction.rollout_is), ("rollout_rs", correction.rollout_rs))
        if value
    ]
    if correction.bypass_mode:
        keys.insert(0, "bypass_mode=true")
    found = []
    if correction.bypass_mode:
        found.append("the ratio of the policy to the one that sampled")
    elif correction.rollout_is:
        found.append("weights: the policy at the start of the step over the one that sampled")
    if correction.rollout_rs:
        found.append("rejection of tokens or rows whose ratio is off")
    return "; ".join(found), f"algorithm.rollout_correction.{', '.join(keys)}"
