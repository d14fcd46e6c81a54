"""One PPO step, shared by every schedule and every algorithm: from scored trajectories to updated weights.

It reads as the algorithm. Comments name the columns that each line adds to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from hybridflow.algorithms.policy_losses import PolicyLoss
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.needs import tells_top_outcomes
from hybridflow.config.root import CriticConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.packing import ROUTES, TOP_OUTCOMES
from hybridflow.protocol.prompt import MEDIA
from hybridflow.protocol.randomness import generator
from hybridflow.stop_token import stop_token
from hybridflow.trainer.ppo.by_source import SourceAdvantages
from hybridflow.trainer.ppo.columns import (
    KLController,
    apply_kl_penalty,
    columns_fetched,
    identify,
    leave_out_unpaired,
    resample,
    select_tokens,
)
from hybridflow.trainer.ppo.data_metrics import batch_metrics, source_metrics, staleness_metrics
from hybridflow.trainer.ppo.exact import ExactState
from hybridflow.trainer.ppo.old_log_probs import OldLogProbs, OldOfStep
from hybridflow.trainer.ppo.replay_buffer import ReplayBuffer, add_columns
from hybridflow.trainer.roles.roles import Roles
from hybridflow.workers.actor import POLICY_COLUMNS, ActorGroup
from hybridflow.workers.correction import correct_rollout
from hybridflow.workers.losses import find_policy_loss
from hybridflow.workers.mini_batches import MiniBatchPlan, Prepare

T = TypeVar("T")

KEPT_COLUMNS = (*POLICY_COLUMNS, MEDIA, "rollout_log_probs", ROUTES)
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
        shows: Callable[[int], bool] = lambda step: True,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        """Build the parts of a step. `exact` says whether rollout and actor are in exact mode, in which the
        rollout's log-probs are the actor's. `shows` says for a step whether samples of it are kept token by
        token: then the batch comes back with all columns but the teacher's top outcomes, also those that only
        workers read. `buffer` has the
        rows of earlier steps that PF-PPO may draw again.
        """
        self.roles = roles
        self.config = config
        self.kl_controller = kl_controller
        self.timer = timer
        self.shows = shows
        self.buffer = buffer
        roles.actor.backend.driver_bytes()  # from now on they are those of steps
        self.side_by_side = Overlap(roles.are_colocated, timer, roles.alone)
        # once: a user's file may be edited while the run goes on
        self.advantages = SourceAdvantages(config)
        estimators = self.advantages.estimators.values()
        self.loss = find_policy_loss(config.actor_rollout_ref.actor)
        self.read_here = columns_fetched(config, estimators, self.loss)
        squares = any("sum_pi_squared" in each.needs for each in estimators)
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
        own = batch  # the rows of this step
        own |= self._keep(own)  # from now on workers of all roles read the tokens where they are
        if self.buffer is not None:
            batch = self.buffer.join(own, step, self._keep)  # rows of earlier steps, behind its own
        batch |= identify(batch)  # group_ids, positive
        columns, old = self._passes(batch, step)
        batch |= columns  # old_log_probs, ref_log_prob, teacher_log_probs, teacher_top_outcomes, values
        shown = {*batch.remote} - {TOP_OUTCOMES}  # which nobody looks at, and is 2k + 1 numbers a token
        batch |= self.roles.actor.fetch(batch, shown if self.shows(step) else self.read_here)
        if self.roles.process_reward:
            with self.timer("process_reward"), self.roles.alone(self.roles.process_reward.role):
                batch |= self._process_rewards(batch, len(own), step, metrics)  # process_rewards
        with self.timer("adv"):
            rewards, kl = apply_kl_penalty(batch, self.config.algorithm, self.kl_controller, len(own))
            batch |= rewards  # token_level_rewards
            batch = self._correct_rollout(batch, metrics)  # rollout_is_weights, a narrower loss_mask
            batch |= self.advantages(batch)  # advantages, returns; of several sources their weights
        if batch is not own:
            add_columns(own, batch)
        metrics.update(kl)
        metrics.update(self._measure(batch, own, old))
        leave_out_unpaired(batch, self.loss)  # a narrower loss_mask, for a loss over the rows of a group
        if self.config.algorithm.use_pf_ppo:
            batch = self._draw(batch, own, step, metrics)
        for found in self.side_by_side(self._updates(batch, own, step, old)):
            metrics.update(found)
        self.old_log_probs.after_update(old, metrics, step)
        self._renew_reference(step)
        if moved := self.roles.actor.backend.driver_bytes():
            metrics.add_sum("perf/driver_bytes", float(moved))
        return batch, metrics

    def _renew_reference(self, step: int) -> None:
        """Copy the actor's weights to the reference where it is due."""
        frequency = self.config.algorithm.ref_update_freq
        if self.roles.reference and frequency and step % frequency == 0:
            self.roles.reference.copy_from(self.roles.actor)

    def _keep(self, rows: DataProto) -> DataProto:
        """Return the remote columns of tokens, which leave the driver once."""
        return self.roles.actor.keep(rows, KEPT_COLUMNS)

    def _passes(self, batch: DataProto, step: int) -> tuple[DataProto, OldOfStep]:
        """Return the outputs of the models on the batch before the update, as columns that stay with the
        workers, and where the old log-probs among them come from.
        """
        roles = self.roles
        first = partial(self.old_log_probs, batch, self._first_plan(step), step)
        jobs: list[RoleCall[Any]] = [RoleCall("actor", "old_log_prob", first)]
        if roles.reference:
            jobs.append(RoleCall("reference", "ref", partial(roles.reference.keep_log_probs, batch)))
        if roles.teacher:
            also = [TOP_OUTCOMES] * tells_top_outcomes(self.config)
            jobs.append(RoleCall("teacher", "teacher", partial(roles.teacher.keep_log_probs, batch, *also)))
        if roles.critic:
            jobs.append(RoleCall("critic", "values", partial(roles.critic.keep_values, batch)))
        with stop_token.leavable():  # no pass changes a state
            found = self.side_by_side(jobs)
        old: OldOfStep = found[0]
        columns = DataProto()
        for each in (old.columns, *found[1:]):  # from the actor's pass also entropys, sum_pi_squared
            columns |= each
        return columns, old

    def _updates(
        self, batch: DataProto, own: DataProto, step: int, old: OldOfStep
    ) -> list[RoleCall[Metrics]]:
        """Return the updates of the critic and, once it has warmed up, of the actor."""
        config = self.config
        drawn_from = len(set(own.non_tensor_batch["uid"])) if config.algorithm.use_pf_ppo else None
        updates: list[RoleCall[Metrics]] = []
        if self.roles.critic:
            plan = self._plan(config.critic, step, drawn_from)
            updates.append(
                RoleCall("critic", "update_critic", partial(self.roles.critic.update, batch, plan))
            )
        if step > config.trainer.critic_warmup:
            hook = mini_batch_hook(self.roles.actor, config, self.loss, step)
            plan = self._plan(config.actor_rollout_ref.actor, step, drawn_from)
            learn = partial(self.roles.actor.update, batch, plan, prepare=hook, watch=old.watch)
            updates.append(RoleCall("actor", "update_actor", learn))
        return updates

    def _draw(self, batch: DataProto, own: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Draw as many trajectories as this step has, by their scores (PF-PPO)."""
        rng = generator(self.config.trainer.seed, "pf_ppo", step)
        drawn = resample(batch, self.config.algorithm.pf_ppo, rng, len(ByTrajectory(own).samples))
        if self.buffer is not None:
            metrics.update(self.buffer.note_drawn(drawn, own, step))
        return drawn

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
        rollout (`OldOfStep.off_policy`).
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

    def _measure(self, batch: DataProto, own: DataProto, old: OldOfStep) -> Metrics:
        """Return the metrics of the step's own rows, and how stale the tokens of all rows are."""
        metrics = batch_metrics(own, has_critic=self.roles.critic is not None)
        metrics.update(old.metrics)
        if len(self.advantages.estimators) > 1:
            metrics.update(source_metrics(own))
        metrics.update(staleness_metrics(batch, self.roles.actor.version))
        metrics.update(self.roles.actor.measure(batch, old.off_policy))
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


@dataclass(frozen=True)
class RoleCall(Generic[T]):
    """A call on a role, with the section of the step's timing that it is counted in."""

    role: str
    section: str
    call: Callable[[], T]


class Overlap:
    """Runs jobs that do not depend on each other side by side, a thread for each set of processes.

    Roles that share processes, as `are_colocated` says, take turns there anyway: their calls run one after
    the other in the caller's thread. With everything colocated, and with the local controller, this is a
    loop.
    """

    def __init__(
        self,
        are_colocated: Callable[[str, str], bool],
        timer: Timer,
        alone: Callable[[str], AbstractContextManager[None]] = lambda role: nullcontext(),
    ) -> None:
        self.are_colocated = are_colocated
        self.timer = timer
        self.alone = alone
        """Context of the calls of a role, in which it has its processes to itself."""

    def __call__(self, jobs: Sequence[RoleCall[T]]) -> list[T]:
        """Return the results in the order of `jobs`.

        Where calls fail, the error of the first of them is raised after the others have ended.
        """
        lanes = self._lanes(jobs)
        results: dict[int, T] = {}
        if len(lanes) <= 1:
            for index, job in enumerate(jobs):
                stop_token.check()
                with self.timer(job.section), self.alone(job.role):
                    results[index] = job.call()
            return list(results.values())
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="overlap") as threads:
            running: list[Future[list[T]]] = [
                threads.submit(self.__call__, [jobs[index] for index in lane]) for lane in lanes
            ]
        for lane, future in zip(lanes, running, strict=True):
            results.update(zip(lane, future.result(), strict=True))
        return [results[index] for index in range(len(jobs))]

    def _lanes(self, jobs: Sequence[RoleCall[T]]) -> list[list[int]]:
        """Return the numbers of jobs that have to run in turn, lane by lane, ordered by their first job."""
        lanes: list[list[int]] = []
        for index, job in enumerate(jobs):
            touched = [
                lane
                for lane in lanes
                if any(self.are_colocated(jobs[other].role, job.role) for other in lane)
            ]
            lanes = [lane for lane in lanes if lane not in touched]
            lanes.append(sorted([index, *(other for lane in touched for other in lane)]))
        return sorted(lanes)


def mini_batch_hook(actor: ActorGroup, config: PPOConfig, loss: PolicyLoss, step: int) -> Prepare | None:
    """Return the function that runs on each whole mini-batch under the current weights, or None:
    rejection and weights in bypass mode, and the tokens that a loss selects (clip_cov, kl_cov).

    Mini-batches are formed on the driver, so that nothing has to be reduced over ranks.
    """
    correction = config.algorithm.rollout_correction
    corrects = correction.bypass_mode and correction.corrects
    if not corrects and loss.select is None:
        return None

    def prepare(mini: DataProto, number: int) -> tuple[DataProto, Metrics]:
        metrics = Metrics()
        current = mini  # before the first update of a step the old log-probs are those of now
        if number > 0 or correction.bypass_mode:
            current = actor.log_probs(mini, with_entropy=False)
        now: Tensor = current.batch["old_log_probs"]
        if corrects:
            found = correct_rollout(mini, correction, now)
            metrics.update(found.metrics)
            # ppo_clip: the ratio to the rollout policy holds the weights already
            if found.weights is not None and correction.loss_type == "reinforce":
                mini |= DataProto.from_dict({"rollout_is_weights": found.weights})
            if found.keep is not None:
                mini.narrow_loss_mask(found.keep)
                leave_out_unpaired(mini, loss)
        if loss.select is not None:
            rng = generator(config.trainer.seed, "select_tokens", step, number)
            mini |= select_tokens(mini, config.actor_rollout_ref.actor, loss, now, rng)
        return mini, metrics

    return prepare
