"""The source of `old_log_probs`: the actor's pass over the batch, or the rollout, whose log-probs are as
good. They are for rows whose tokens all carry the actor's version; all other rows get the pass.

exact mode    the rollout's: equal to the bit, which is checked here on `exact_check_rows` rows, and on those
              of the first mini-batch in its update
exact=auto    the same, but a difference brings the pass back and does not end the run
fast mode     the pass; with `reuse_log_probs_within` the rollout's where they are that close on
              `exact_check_rows` rows
bypass mode   the rollout's, however far they are
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.config import PPOConfig
from hybridflow.config.thresholds import parse_is_threshold
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.exact import ExactState
from hybridflow.trainer.roles.roles import Roles
from hybridflow.workers import ActorWorker, RolloutWorker
from hybridflow.workers.correction import rows_of_version, sampled_rows
from hybridflow.workers.log_prob_check import (
    APART,
    LogProbCheck,
    OffPolicy,
    check_same,
    check_same_weights,
    comparable_tokens,
    difference,
)
from hybridflow.workers.mini_batches import MiniBatchPlan, mini_batch_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OldOfStep:
    """The old log-probs of one step, and what the rest of the step does with them."""

    columns: DataProto
    """old_log_probs [B, R], and from a pass entropys and what the estimator needs, as remote columns."""
    metrics: Metrics
    off_policy: OffPolicy
    """What is to be measured where the columns are."""
    watch: LogProbCheck | None = None
    """Set where they are the rollout's: the first update then looks at all of its rows."""


class OldLogProbs:
    """The source of old log-probs in a run. All that it keeps from step to step is in `exact`."""

    def __init__(
        self, roles: Roles, config: PPOConfig, *, exact: ExactState, with_sum_pi_squared: bool
    ) -> None:
        self.roles = roles
        self.actor = roles.actor
        self.config = config
        self.exact = exact
        self.stops = config.actor_rollout_ref.rollout.exact is True
        self.with_sum_pi_squared = with_sum_pi_squared
        correction = config.algorithm.rollout_correction
        self.correction = correction
        self.within = config.actor_rollout_ref.rollout.reuse_log_probs_within
        if config.actor_rollout_ref.rollout.skip.enable or correction.corrects:
            self.within = (
                None  # weights and rejection compare the rollout with the pass, so every step has one
            )
        if with_sum_pi_squared and (exact.reuses or self.within is not None):
            logger.info("an estimator needs Σπ² from the pass for old log-probs, so that pass stays")

    def __call__(self, batch: DataProto, plan: MiniBatchPlan | None, step: int) -> OldOfStep:
        """Return the old log-probs of step number `step`.

        `plan` is the plan of the update, if there is one. Raises TrainingError in exact mode where the
        rollout's log-probs are not those of training.
        """
        if self.correction.bypass_mode:
            return OldOfStep(self._rollouts(batch, sampled_rows(batch)), Metrics(), OffPolicy())
        metrics = Metrics()
        version = self.actor.version
        current = bool(rows_of_version(batch, version).any())
        if (
            self.exact.reuses
            and current
            and not self.roles.are_colocated(self.actor.role, self.roles.rollout.role)
        ):
            parts = self.actor.call_list(ActorWorker.weight_sums)
            with self.roles.rollout.set_aside():
                theirs = self.roles.rollout.call_list(RolloutWorker.weight_sums)
            check_same_weights(parts, theirs, step)
        reuses = (self.exact.reuses or self.within is not None) and not self.with_sum_pi_squared
        if reuses and current:
            agreed, found = self._agree(batch, self._rows_to_check(batch, plan, step), step, version)
            metrics.add_mean("training/old_log_probs_from_rollout", float(agreed))
            if agreed:
                metrics.update(found)
                # in fast mode the rollout's own log-probs say nothing of the rollout
                off_policy = self._off_policy(batch, None, measures=self.exact.reuses)
                watch = LogProbCheck(step, version, self.exact.reuses, self.stops)
                columns = self._rollouts(batch, rows_of_version(batch, version))
                return OldOfStep(columns, metrics, off_policy, watch)
        check = LogProbCheck(step, version, self.exact.reuses)
        off_policy = self._off_policy(batch, check, measures=True)
        columns = self.actor.keep_log_probs(
            batch,
            with_sum_pi_squared=self.with_sum_pi_squared,
            with_routes=self.config.actor_rollout_ref.actor.router_replay.mode == "R2",
        )
        return OldOfStep(columns, metrics, off_policy)

    def _off_policy(self, batch: DataProto, check: LogProbCheck | None, *, measures: bool) -> OffPolicy:
        """Return which metrics to compute; `measures` says whether `rollout_corr/*` are among it."""
        bounds = None
        if measures and not self.correction.corrects:
            bounds = parse_is_threshold(self.correction.rollout_is_threshold)
        version = self.actor.version
        sampled = batch.batch["response_mask"] & sampled_rows(batch)[:, None]
        if not bool((batch.batch["policy_version"][sampled] != version).any()):
            return OffPolicy(check, bounds)
        return OffPolicy(check, bounds, version)

    def _of_rollout(self, batch: DataProto) -> Tensor:
        """Return the rollout's log-probs [B, R], which may be remote."""
        rows = batch
        if "rollout_log_probs" not in batch:
            rows = self.actor.fetch(batch, ["rollout_log_probs"])
        found: Tensor = rows.batch["rollout_log_probs"]
        return found

    def _agree(self, batch: DataProto, rows: list[int], step: int, version: int) -> tuple[bool, Metrics]:
        """Return whether the rollout's log-probs may replace the actor's, judged by these rows, and the
        metrics.
        """
        if not rows:  # all of them are in the first mini-batch, whose update looks at every one
            return True, Metrics()
        some = batch.select_idxs(rows)
        trained: Tensor = self.actor.log_probs(some, with_entropy=False).batch["old_log_probs"]
        rollout = self._of_rollout(some)
        sampled = comparable_tokens(some, version)
        if self.exact.reuses and self.stops:
            check_same(some, rollout, trained, step=step, version=version)
        metrics = difference(rollout[sampled], trained[sampled])
        metrics.add_sum("training/rollout_rows_checked", float(len(rows)))
        worst = 0.0
        if bool(sampled.any()):
            worst = float((rollout - trained)[sampled].abs().max())
        if self.exact.reuses and worst:
            self._give_up(worst, step)
        return self.exact.reuses or (self.within is not None and worst <= self.within), metrics

    def after_update(self, old: OldOfStep, metrics: Metrics, step: int) -> None:
        """Check the measurements of the step's first mini-batch.

        With `exact=auto` a difference there brings the pass back.
        """
        if self.exact.reuses and old.watch is not None and (worst := metrics.to_floats().get(APART, 0.0)):
            self._give_up(worst, step)

    def _give_up(self, worst: float, step: int) -> None:
        logger.warning(
            "old log-probs are computed from now on: in step %d log-probs of rollout and training differ by "
            "up to %.2g nats under the same weights, so this machine computes a row differently in another "
            "batch (actor_rollout_ref.rollout.exact=true would have stopped)",
            step,
            worst,
        )
        self.exact.reuse_ended = True

    def _rows_to_check(self, batch: DataProto, plan: MiniBatchPlan | None, step: int) -> list[int]:
        """Return `exact_check_rows` rows that the actor's version sampled, drawn again each step.

        In exact mode they are drawn among the rows that the first update does not compare.
        """
        count = self.config.actor_rollout_ref.rollout.exact_check_rows
        seen: set[int] = set()
        if self.exact.reuses and plan is not None:
            first = next(mini_batch_rows(list(batch.non_tensor_batch["uid"]), plan), [])
            learned = batch.batch["loss_mask"].any(-1)  # the update leaves the other rows out
            seen = {row for row in first if learned[row]}
        candidates = rows_of_version(batch, self.actor.version).nonzero()[:, 0].tolist()
        left = [row for row in candidates if row not in seen]
        order = torch.randperm(
            len(left), generator=generator(self.config.trainer.seed, "exact_check", step)
        ).tolist()
        return sorted(left[place] for place in order[:count])

    def _rollouts(self, batch: DataProto, taken: Tensor) -> DataProto:
        """Take the rollout's log-probs as old ones in the rows `taken` [B] bool.

        The others get the actor's, such as answers of the data (SPIN), which no rollout has sampled.
        """
        others = ~taken
        if not bool(others.any()):
            return batch.select(["rollout_log_probs"], [], []).rename("rollout_log_probs", "old_log_probs")
        old = self._of_rollout(batch).clone()
        pass_over = self.actor.log_probs(batch.select_idxs(others), with_entropy=False)
        old[others] = pass_over.batch["old_log_probs"]
        columns = DataProto.from_dict({"old_log_probs": old})
        return columns | self.actor.keep(columns, ["old_log_probs"])
