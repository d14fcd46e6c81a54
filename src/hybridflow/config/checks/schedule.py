"""The checks of `trainer.schedule`, of the keys of `trainer.async`, and of rows that are trained again.

    resolved config ──schedule_problems──► one line for each key that does not fit, with the way out

`resolve.py` has filled run_ahead and max_staleness: 0 and 0 mean that no token is ever stale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from hybridflow.config.checks.correction import uncorrected
from hybridflow.config.needs import is_given, replayed_steps
from hybridflow.config.root import PPOConfig
from hybridflow.config.trainer import EXACT_SCHEDULES

PATH = "trainer.async"


def schedule_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each number that does not fit the schedule, and for each key that it cannot read."""
    schedule = config.trainer.schedule
    if schedule == "sync":
        return
    yield from _bounds(config)
    if schedule in EXACT_SCHEDULES and config.trainer.async_.run_ahead > 0:
        yield from _refill(config)


def _bounds(config: PPOConfig) -> Iterator[str]:
    """How far generation runs ahead, and the bound on staleness."""
    schedule = config.trainer.schedule
    ahead = config.trainer.async_.run_ahead
    bound = config.trainer.async_.max_staleness
    shown = f"{PATH}.run_ahead={ahead:g}"
    if schedule == "one_step_off" and ahead not in (0, 1):
        yield (
            f"{shown} with trainer.schedule=one_step_off, which is 1 step ahead: leave it out, or set "
            "trainer.schedule=exact_async for more steps, or fully_async for a part of a step"
        )
    elif not math.isfinite(ahead):
        yield f"{shown}: wanted a number of steps, for example 1"
    elif schedule in EXACT_SCHEDULES and ahead != int(ahead):
        yield (
            f"{shown} with trainer.schedule={schedule}, which generates whole batches: set a whole number, "
            "or trainer.schedule=fully_async"
        )
    if bound is None or not math.isfinite(ahead):
        return  # resolve fills max_staleness where run_ahead is a number of steps
    if schedule in EXACT_SCHEDULES and bound != math.ceil(ahead):
        yield (
            f"{PATH}.max_staleness={bound} with trainer.schedule={schedule}, where every token is {shown} "
            f"steps old once the run is under way: leave {PATH}.max_staleness out"
        )
    elif bound < ahead:
        yield (
            f"{PATH}.max_staleness={bound} is less than {shown}, the steps that generation runs ahead: set "
            f"it to {math.ceil(ahead)} or more, or lower run_ahead"
        )


def uncorrected_rows(config: PPOConfig) -> Iterator[str]:
    """A loss on stale tokens has to know the policy that sampled them."""
    bound = config.trainer.async_.max_staleness
    age = replayed_steps(config)
    if not bound and not age:
        return
    stale = f"trainer.schedule={config.trainer.schedule} trains tokens up to {bound} steps old"
    if age:
        stale = f"algorithm.pf_ppo.max_age={age} trains rows again that are up to {age} steps older"
    yield from uncorrected(config, stale)


def _refill(config: PPOConfig) -> Iterator[str]:
    """An exact schedule knows the prompts of a batch before any of them is generated."""
    groups = config.algorithm.filter_groups
    batch = config.data.train_batch_size
    if groups.enable and config.data.gen_batch_size not in (None, batch):
        yield (
            f"data.gen_batch_size={config.data.gen_batch_size} with "
            f"trainer.schedule={config.trainer.schedule}, which generates the {batch} prompts of a step and "
            "never replaces a group that dynamic sampling drops: leave it out, or set "
            "trainer.schedule=fully_async, which refills"
        )


def schedule_notes(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each key that has less effect than it seems to have."""
    schedule = config.trainer.schedule
    keys = config.trainer.async_
    if schedule == "sync":
        return
    exact = schedule in EXACT_SCHEDULES
    if exact and is_given(f"{PATH}.partial_rollout", given):
        yield (
            f"{PATH}.partial_rollout is not read with trainer.schedule={schedule}: a response is generated "
            "whole under one version of the weights"
        )
    if exact and keys.run_ahead and config.algorithm.filter_groups.enable:
        yield (
            f"algorithm.filter_groups.enable=true with trainer.schedule={schedule}: groups that are dropped "
            "are not replaced, so such a batch is smaller (max_num_gen_batches is not read); fully_async "
            "refills"
        )
    batch = config.data.train_batch_size
    if 0 < keys.run_ahead * batch < 1:
        yield (
            f"{PATH}.run_ahead={keys.run_ahead:g} of data.train_batch_size={batch} groups is less than one "
            f"group, so nothing is generated ahead: set it to {1 / batch:.3g} or more"
        )
