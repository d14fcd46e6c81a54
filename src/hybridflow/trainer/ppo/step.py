"""One PPO step, shared by every schedule and every algorithm: from scored trajectories to updated weights.

It reads as the algorithm. Comments name the columns that each line adds to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.critic import CriticConfig
from hybridflow.controller.stored_rows import STORED_AT
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.packing import ROUTES
from hybridflow.protocol.prompt import MEDIA
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.collector import REPETITION, whole
from hybridflow.trainer.ppo.columns import (
    KLController,
    apply_kl_penalty,
    columns_fetched,
    estimate_advantages,
    find_estimator,
    identify,
    leave_out_unpaired,
    resample,
)
from hybridflow.trainer.ppo.data_metrics import batch_metrics, staleness_metrics
from hybridflow.trainer.ppo.exact import ExactState
from hybridflow.trainer.ppo.mini_batch_hooks import mini_batch_hook
from hybridflow.trainer.ppo.old_log_probs import OldLogProbs
from hybridflow.trainer.ppo.overlap import Job, Overlap
from hybridflow.trainer.ppo.replay_buffer import ReplayBuffer, add_columns
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.workers.actor import POLICY_COLUMNS
from hybridflow.workers.correction import correct_rollout
from hybridflow.workers.losses import find_policy_loss
from hybridflow.workers.mini_batches import MiniBatchPlan

STORED_COLUMNS = (*POLICY_COLUMNS, MEDIA, "rollout_log_probs", ROUTES)
"""The columns that workers of several roles or in several calls read."""


class PPOStep:
    """The part of a training step between generation and the next weights.

    Its whole state is in `kl_controller`, `exact` and `buffer`.
    """

    def __init__(
        self,
        roles: Roles,
        config: PPOConfig,
        kl_controller: KLController,
        timer: Timer,
        *,
        exact: ExactState,
        leavable: Callable[[], AbstractContextManager[None]] = nullcontext,
        shows: Callable[[int], bool] = lambda step: True,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        """Build the parts of a step. `exact` says whether rollout and actor are in exact mode, in which the
        rollout's log-probs are the actor's. `leavable` is the context of passes that change no state, where a
        stopped run may leave the step. `shows` says of a step whether samples of it are kept token by token:
        then the batch comes back with all columns, also those that only workers read. `buffer` has the rows
        of earlier steps that PF-PPO may draw again.
        """
        self.roles = roles
        self.config = config
        self.kl_controller = kl_controller
        self.timer = timer
        self.leavable = leavable
        self.shows = shows
        self.buffer = buffer
        self.row_store = roles.actor.backend.rows
        self._stored: list[int] = []
        self.driver_bytes = roles.actor.backend.driver_bytes
        self.side_by_side = Overlap(roles.together, timer)
        # once: a user's file may be edited while the run goes on
        self.estimator = find_estimator(config.algorithm)
        self.loss = find_policy_loss(config.actor_rollout_ref.actor)
        self.fetched = columns_fetched(config, self.estimator, self.loss)
        squares = "sum_pi_squared" in self.estimator.needs
        self.old_log_probs = OldLogProbs(roles, config, exact=exact, with_sum_pi_squared=squares)

    def __call__(self, batch: DataProto, step: int) -> tuple[DataProto, Metrics]:
        """Train on `batch` as step number `step` (from 1); return the batch with its columns, and the
        metrics. A batch without rows, whose trajectories have all failed, makes no update.
        """
        metrics = Metrics()
        if not len(batch):
            self._renew_reference(step)
            metrics.add_sum("perf/total_num_tokens", 0.0)
            return batch, metrics
        new = batch
        if self.buffer is not None:
            batch = self.buffer.join(new, step)  # rows of earlier steps, behind those of this one
        roles = self.roles
        algorithm = self.config.algorithm
        timer = self.timer
        fetch = None if self.shows(step) else self.fetched
        batch |= identify(batch)  # group_ids, positive
        self._store_tokens(batch, all_columns=fetch is None)
        batch |= self._fetch(batch, fetch)  # what was stored before the step and is read here
        old = partial(self.old_log_probs, batch, self._first_plan(step), step, fetch)
        # old_log_probs; from a pass also entropys, sum_pi_squared
        jobs = [Job("actor", "old_log_prob", old)]
        if roles.reference:
            # ref_log_prob
            jobs.append(Job("reference", "ref", partial(roles.reference.log_probs, batch, fetch=fetch)))
        if roles.teacher:
            # teacher_log_probs
            jobs.append(Job("teacher", "teacher", partial(roles.teacher.log_probs, batch, fetch=fetch)))
        if roles.critic:
            jobs.append(Job("critic", "values", partial(roles.critic.values, batch)))  # values
        with self.leavable():
            found_columns = self.side_by_side(jobs)
        for columns in found_columns:
            batch |= columns
        if roles.process_reward:
            with timer("process_reward"):
                batch |= self._process_rewards(batch, len(new), step, metrics)  # process_rewards
        with timer("adv"):
            rewards, kl_metrics = apply_kl_penalty(batch, algorithm, self.kl_controller, len(new))
            batch |= rewards  # token_level_rewards
            batch = self._correct_rollout(batch, metrics)  # rollout_is_weights, a narrower loss_mask
            batch |= estimate_advantages(batch, self.config, self.estimator)  # advantages, returns
        metrics.update(kl_metrics)
        if batch is not new:
            add_columns(new, batch)
        metrics.update(self._measure(batch, new))
        leave_out_unpaired(batch, self.loss)  # a narrower loss_mask, for a loss over the rows of a group
        drawn_from = None
        if algorithm.use_pf_ppo:
            drawn_from = len(set(new.non_tensor_batch["uid"]))
            batch = self._draw(batch, new, step, metrics)
        updates: list[Job[Metrics]] = []
        if roles.critic:
            learn = partial(roles.critic.update, batch, self._plan(self.config.critic, step, drawn_from))
            updates.append(Job("critic", "update_critic", learn))
        if step > self.config.trainer.critic_warmup:
            hook = mini_batch_hook(roles.actor, self.config, self.loss, step)
            watch = self.old_log_probs.watch
            plan = self._plan(self.config.actor_rollout_ref.actor, step, drawn_from)
            learn = partial(roles.actor.update, batch, plan, prepare=hook, watch=watch)
            updates.append(Job("actor", "update_actor", learn))
        for found in self.side_by_side(updates):
            metrics.update(found)
        self.old_log_probs.after_update(metrics, step)
        self._clear_tokens()
        metrics.update(self._driver_bytes())
        self._renew_reference(step)
        return batch, metrics

    def _renew_reference(self, step: int) -> None:
        """Copy the actor's weights to the reference where it is due."""
        frequency = self.config.algorithm.ref_update_freq
        if self.roles.reference and frequency and step % frequency == 0:
            self.roles.reference.copy_from(self.roles.actor)

    def _store_tokens(self, batch: DataProto, *, all_columns: bool) -> None:
        """Put the columns that workers read into the row store, so that they leave the driver once.

        Those that are there already were kept where they were made. Of rows that collectors have made, the
        store is told where they are, and the driver gets `all_columns`, if these are asked for.
        """
        if self.buffer is None:
            self._clear_tokens()  # of a step that was left
        if STORED_AT in batch:
            self.row_store.keep_collected(batch, STORED_COLUMNS)
            if all_columns:
                batch |= whole(batch)
                batch.pop([REPETITION], [STORED_AT])
        if "row_id" not in batch:
            return
        rows = batch
        if self.buffer is not None:
            rows = batch.select_idxs(self.buffer.not_stored(batch, self.row_store, STORED_COLUMNS))
        ids = rows.batch["row_id"].tolist()
        self._stored = ids
        there = self.row_store.names(rows)
        names = [name for name in STORED_COLUMNS if name in rows and name not in there]
        if names:
            tensors = [name for name in names if name != MEDIA]
            self.row_store.put(ids, rows.select(tensors, [MEDIA] if MEDIA in names else [], []))

    def _clear_tokens(self) -> None:
        """Forget the rows of the step; with a buffer all but what later steps read again of its rows."""
        if self.buffer is None:
            self.row_store.clear(self._stored)
        else:
            self.row_store.keep_only(self.buffer.row_ids, STORED_COLUMNS)
        self._stored = []

    def _fetch(self, batch: DataProto, wanted: Set[str] | None) -> DataProto:
        """Return those stored columns in `wanted` (None: all) that the batch does not have."""
        stored = self.row_store.names(batch)
        missing = [
            name for name in sorted(stored) if name not in batch and (wanted is None or name in wanted)
        ]
        if not missing:
            return DataProto.from_dict()
        return self.roles.actor.fetch(batch, missing)

    def _draw(self, batch: DataProto, new: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Draw as many trajectories as this step has itself, by their scores (PF-PPO)."""
        rng = generator(self.config.trainer.seed, "pf_ppo", step)
        drawn = resample(batch, self.config.algorithm.pf_ppo, rng, len(ByTrajectory(new).samples))
        if self.buffer is not None:
            metrics.update(self.buffer.note_drawn(drawn, new, step))
        return drawn

    def _driver_bytes(self) -> Metrics:
        """Return the bytes that the driver has sent and received by value since the step before.

        There are none where all roles are in its own process.
        """
        metrics = Metrics()
        so_far = self.roles.actor.backend.driver_bytes
        if so_far:
            metrics.add_sum("perf/driver_bytes", float(so_far - self.driver_bytes))
        self.driver_bytes = so_far
        return metrics

    def _process_rewards(self, batch: DataProto, num_new: int, step: int, metrics: Metrics) -> DataProto:
        """Return q_t of the implicit process reward model.

        It learns from the outcomes of the step's own rows, the first `num_new`, before or after it scores the
        batch (`process_reward_model.update`).
        """
        group = self.roles.process_reward
        config = self.config.reward.process_reward_model
        assert group is not None and config.ppo_mini_batch_size is not None, "filled by resolve"
        plan = MiniBatchPlan(config.ppo_mini_batch_size, 1, True, self.config.trainer.seed, step)
        if config.update == "before":
            metrics.update(group.update(batch[:num_new], plan))
        rewards = group.rewards(batch)
        if config.update == "after":
            metrics.update(group.update(batch[:num_new], plan))
        return rewards

    def _correct_rollout(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Add weights and narrow `loss_mask` against the policy that sampled.

        In bypass mode each mini-batch is corrected for itself. Without a correction workers measure the
        rollout (`OldLogProbs.off_policy`).
        """
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode or not correction.corrects:
            return batch
        found = correct_rollout(batch, correction, batch.batch["old_log_probs"])
        metrics.update(found.metrics)
        if found.keep is not None:
            batch.narrow_loss_mask(found.keep)
        if found.weights is not None:
            batch |= DataProto.from_dict({"rollout_is_weights": found.weights})
        return batch

    def _measure(self, batch: DataProto, new: DataProto) -> Metrics:
        """Return the metrics of the step's own rows `new`, and how stale the tokens of all rows are."""
        metrics = batch_metrics(new, has_critic=self.roles.critic is not None)
        metrics.update(self.old_log_probs.metrics)
        metrics.update(staleness_metrics(batch, self.roles.actor.version))
        metrics.update(self.roles.actor.measure(batch, self.old_log_probs.off_policy))
        return metrics

    def _first_plan(self, step: int) -> MiniBatchPlan | None:
        """Return the plan of the step's update if it already says which rows the first mini-batch learns
        from.
        """
        if step <= self.config.trainer.critic_warmup or self.config.algorithm.use_pf_ppo:
            return None
        if self.loss.keeps_groups:  # which rows are left out is known with the advantages
            return None
        return self._plan(self.config.actor_rollout_ref.actor, step)

    def _plan(
        self, keys: ActorConfig | CriticConfig, step: int, drawn_from: int | None = None
    ) -> MiniBatchPlan:
        size = keys.ppo_mini_batch_size
        epochs = keys.ppo_epochs
        shuffle = keys.shuffle
        assert size is not None and epochs is not None and shuffle is not None, "filled by resolve"
        return MiniBatchPlan(size, epochs, shuffle, self.config.trainer.seed, step, drawn_from)
