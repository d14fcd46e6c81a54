"""The rules that find why a run is slow: one function a cause, each with what it computes from which figures.

    RunTimes ──RULES──► Wait, … ──waits_of──► the largest first

A phase is forecast by the planner's model, waits that the model does not know (rewards, tools, checkpoints,
validations) by what was counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybridflow.config.relations import shown
from hybridflow.config.tree import get_value
from hybridflow.planner.costs import StepRows
from hybridflow.trainer.ppo.run_plan import plan_of
from hybridflow.trainer.why.run_times import TIMING, RunTimes

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
SMALL = 0.02
"""Part of a step below which a saving is not worth a key."""
OFTEN = 0.05
"""Part of a step that validations, or checkpoints, may take."""
NESTED = ("step", "testing", "val_gen", "val_reward", "save_checkpoint")
"""Sections that are the whole step, or come now and then."""


@dataclass(frozen=True)
class Wait:
    """Something that steps wait for."""

    cause: str
    """Name of the rule."""
    seconds: float
    """Seconds of a mean step that it takes now."""
    text: str
    """The numbers that show it."""
    key: str = ""
    """Key that shortens it; empty where only the user's own data or code can."""
    value: Any = None
    """Value to try."""
    saved: float | None = None
    """Seconds of a mean step that this value is forecast to save; None where nothing can be counted."""
    also: tuple[str, ...] = ()
    """Further overrides without which a run refuses the value."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The key with the value to try, and what it needs, as a command line takes them."""
        if not self.key:
            return ()
        return (f"{self.key}={shown(self.value)}", *self.also)


def validations(run: RunTimes) -> Iterator[Wait]:
    """Find validations that take more of the run than they may."""
    every = run.config.trainer.test_freq
    seconds = _regular(run, "testing", every)
    if seconds > OFTEN * run.seconds:
        yield _rarer("validations", "trainer.test_freq", every, seconds, run.seconds, "validate")


def checkpoints(run: RunTimes) -> Iterator[Wait]:
    """Find checkpoints that take more of the run than they may."""
    every = run.config.trainer.save_freq
    seconds = _regular(run, "save_checkpoint", every)
    if seconds > OFTEN * run.seconds:
        yield _rarer("checkpoints", "trainer.save_freq", every, seconds, run.seconds, "save a checkpoint")


def _regular(run: RunTimes, phase: str, every: int) -> float:
    """Return the seconds of a mean step that a phase takes because it comes every `every` steps.

    A run's last step has it anyway, which is much of a short run.
    """
    if every <= 0:
        return 0.0
    return min(run.of_phase(phase), run.usual(f"{TIMING}{phase}") / every)


def _rarer(cause: str, key: str, every: int, seconds: float, of_step: float, what: str) -> Wait:
    """Return the wait for something that comes every `every` steps, and so often that it takes OFTEN."""
    factor = math.ceil(seconds / (OFTEN * (of_step - seconds)))
    text = f"steps that {what} (every {every}) add {seconds:.3g} s to a mean step of {of_step:.3g} s"
    return Wait(cause, seconds, text, key, every * factor, seconds * (1 - 1 / factor))


def rewards(run: RunTimes) -> Iterator[Wait]:
    """Find a trainer that waits for scores."""
    seconds = run.of_phase("reward")
    workers = run.config.reward.num_workers
    longest = run.usual("reward/seconds_per_row_max")
    rows = run.rows.count
    text = (
        f"scoring {rows:.0f} responses holds a step up for {seconds:.3g} s, with {workers} processes "
        f"(the longest score took {longest:.3g} s)"
    )
    if longest > seconds / 2:
        text += ": one slow score decides, so make it faster or give it a deadline"
        yield Wait("rewards", seconds, text, "reward.timeout", None, None)
        return
    now = max(workers, 1)
    # scores that wait for something else than this machine's cores may be many more than these
    wanted = max(min(2 * (os.cpu_count() or 1), 8 * now), now + 1)
    yield Wait(
        "rewards", seconds, text, "reward.num_workers", wanted, seconds - max(seconds * now / wanted, longest)
    )


def tools(run: RunTimes) -> Iterator[Wait]:
    """Find trajectories that wait for tools and environments and not for the model."""
    seconds = run.of_phase("gen") - run.by_model
    if not seconds:
        return
    workers = run.config.actor_rollout_ref.rollout.agent.num_workers
    text = (
        f"generation takes {run.of_phase('gen'):.3g} s, of which the model needs {run.by_model:.3g} s; in "
        f"the rest trajectories wait for tools and environments, whose code {workers} processes run"
    )
    wanted = 4 * max(workers, 1)
    saved = seconds * (1 - max(workers, 1) / wanted)
    yield Wait("tools", seconds, text, f"{ROLLOUT}.agent.num_workers", wanted, saved)


def few_rows(run: RunTimes) -> Iterator[Wait]:
    """Find engines that have fewer places than there are requests."""
    limit = run.config.actor_rollout_ref.rollout.max_num_seqs
    wanted = math.ceil(run.rows.count / run.replicas)
    if run.usual("rollout/max_rows") < limit or wanted <= limit:
        return
    value = 2 ** math.ceil(math.log2(wanted))
    text = (
        f"an engine has {wanted} responses to generate and decodes {limit} at once: as many steps read the "
        "weights for fewer rows (if its memory has room for more)"
    )
    key = f"{ROLLOUT}.max_num_seqs"
    yield Wait("few_rows", run.by_model, text, key, value, run.saving("gen", {key: value}))


def preemptions(run: RunTimes) -> Iterator[Wait]:
    """Find requests that are computed again because the cache of keys and values was full."""
    preempted = run.usual("rollout/preemptions")
    requests = run.usual("rollout/requests")
    if not preempted:
        return
    text = f"{preempted:.0f} of {requests:.0f} requests lost their place in the cache and were read again"
    value = min(0.95, run.config.actor_rollout_ref.rollout.gpu_memory_utilization + 0.2)
    seconds = run.of_phase("gen") * preempted / requests
    yield Wait("preemptions", seconds, text, f"{ROLLOUT}.gpu_memory_utilization", value, seconds / 2)


def tail(run: RunTimes) -> Iterator[Wait]:
    """Find batches at whose end a few long responses are generated alone."""
    lengths = run.rows.lengths
    if run.config.trainer.schedule != "sync":
        return
    key = "trainer.schedule"
    schedule = "fully_async" if plan_of(run.config).apart else "colocated_async"
    saved = run.saving("gen", {key: schedule})
    text = (
        f"the longest response has {lengths.quantile(1):.0f} tokens and the mean one {lengths.mean:.0f}: "
        "engines run half empty until it ends. Groups that are generated ahead fill them; their tokens are "
        "some steps old, which is corrected for. Or cut the longest"
    )
    correction = run.config.algorithm.rollout_correction
    corrected = correction.corrects or correction.bypass_mode
    also = () if corrected else (f"{CORRECTION}.rollout_is=token",)
    yield Wait("tail", run.by_model, text, key, schedule, saved, also)


def micro_batches(run: RunTimes) -> Iterator[Wait]:
    """Find passes over so few rows that what they cost each outweighs the rows."""
    for cause, phase, name in (
        ("micro_batches", "update_actor", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        ("log_prob_batches", "old_log_prob", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    ):
        rows = get_value(run.config, name)
        if rows is None:
            continue
        text = (
            f"a pass has at most {rows} rows, and the limit of tokens would let it have more: without this "
            "limit there are fewer passes, each with what it costs besides its tokens (memory is then that "
            "of the limit of tokens)"
        )
        yield Wait(cause, run.of_phase(phase), text, name, None, run.saving(phase, {name: None}))


def recomputation(run: RunTimes) -> Iterator[Wait]:
    """Find activations that are computed twice."""
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if get_value(run.config, key):
        text = (
            "activations are computed a second time in the backward pass (set it to false if memory allows)"
        )
        seconds = run.of_phase("update_actor")
        yield Wait("recomputation", seconds, text, key, False, run.saving("update_actor", {key: False}))


def log_probs_again(run: RunTimes) -> Iterator[Wait]:
    """Find a pass whose log-probs generation has given already."""
    key = f"{CORRECTION}.bypass_mode"
    if get_value(run.config, key):
        return
    seconds = run.of_phase("old_log_prob")
    text = (
        f"log-probs of the sampled tokens are computed a second time ({seconds:.3g} s); generation has given "
        "them, and a run may take its (rollout.exact=true makes them the same bits)"
    )
    yield Wait("log_probs_again", seconds, text, key, True, seconds)


def idle_reference(run: RunTimes) -> Iterator[Wait]:
    """Find a reference whose KL term counts nothing."""
    actor = run.config.actor_rollout_ref.actor
    if actor.use_kl_loss and not actor.kl_loss_coef and not run.config.algorithm.use_kl_in_reward:
        seconds = run.of_phase("ref")
        text = f"the reference takes {seconds:.3g} s, and actor.kl_loss_coef is 0, so that it counts nothing"
        yield Wait("idle_reference", seconds, text, f"{ACTOR}.use_kl_loss", False, seconds)


def dropped_groups(run: RunTimes) -> Iterator[Wait]:
    """Find dynamic sampling that generates several batches one after the other."""
    batches = run.usual("training/num_gen_batches")
    if batches <= 1 or run.predict is None:
        return
    data = run.config.data
    size = data.gen_batch_size or data.train_batch_size
    value = math.ceil(size * batches)
    each = StepRows(run.rows.count / batches, run.rows.prompt, run.rows.lengths, run.rows.group)
    apart = batches * run.predict(run.config, each)["gen"].of_tokens
    together = run.predict(run.config, run.rows)["gen"].of_tokens
    seconds = run.by_model
    text = (
        f"a batch takes {batches:.0f} generation batches, each with its own longest response: one of "
        f"{value} prompts has one"
    )
    saved = max(0.0, seconds * (1 - together / apart))
    yield Wait("dropped_groups", seconds, text, "data.gen_batch_size", value, saved)


def idle_trainer(run: RunTimes) -> Iterator[Wait]:
    """Find a trainer that waits for groups that are generated elsewhere."""
    seconds = run.of_phase("wait_for_rollouts")
    if seconds:
        text = f"training waits {seconds:.3g} s of a step for rollouts: give generation more devices"
        yield Wait("idle_trainer", seconds, text, "trainer.resource_pools", None, None)


def pushes(run: RunTimes) -> Iterator[Wait]:
    """Find weights that take long to reach the engines."""
    seconds = run.of_phase("update_weights")
    if seconds:
        text = f"new weights take {seconds:.3g} s to reach the engines, which stand meanwhile"
        yield Wait("pushes", seconds, text, "trainer.placement", None, None)


def driver(run: RunTimes) -> Iterator[Wait]:
    """Find time that no phase accounts for."""
    phases = {name for step in run.steps for name in step if name.startswith(TIMING)}
    known = sum(run.mean(name) for name in phases if name.removeprefix(TIMING) not in NESTED)
    known += run.of_phase("testing") + run.of_phase("save_checkpoint")
    seconds = run.seconds - known
    text = (
        f"{seconds:.3g} s of a step are in no phase: reading data, filters, logging. `hybridflow profile` "
        "shows them"
    )
    yield Wait("driver", seconds, text)


Rule = Callable[[RunTimes], Iterator[Wait]]
RULES: tuple[Rule, ...] = (
    validations,
    checkpoints,
    rewards,
    tools,
    few_rows,
    preemptions,
    tail,
    micro_batches,
    recomputation,
    log_probs_again,
    idle_reference,
    dropped_groups,
    idle_trainer,
    pushes,
    driver,
)


def waits_of(run: RunTimes) -> list[Wait]:
    """Return the waits of the run, by the seconds that can be saved; those without a forecast come behind
    the others, by what they take. Nothing that takes, or saves, less than SMALL of a step is reported.
    """
    found = [wait for rule in RULES for wait in rule(run)]
    least = SMALL * run.seconds
    found = [wait for wait in found if (wait.seconds if wait.saved is None else wait.saved) >= least]
    return sorted(found, key=lambda wait: (wait.saved is None, -(wait.saved or wait.seconds)))
