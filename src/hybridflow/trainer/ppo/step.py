"""One PPO step, shared by every schedule and every algorithm: from scored trajectories to updated weights.

Read it as the algorithm. The right margin names the columns that each line adds to the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from hybridflow.algorithms.masked import masked_mean
from hybridflow.config import PPOConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.randomness import generator
from hybridflow.trainer.ppo.data_metrics import batch_metrics
from hybridflow.trainer.ppo.exact import ExactState
from hybridflow.trainer.ppo.mini_batch_hooks import mini_batch_hook
from hybridflow.trainer.ppo.old_log_probs import OldLogProbs
from hybridflow.trainer.ppo.overlap import Job, Overlap
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.trainer.ppo.spread import dealt_by
from hybridflow.workers.bridge import (
    KLController,
    apply_kl_penalty,
    correct_rollout,
    estimate_advantages,
    find_estimator,
    find_policy_loss,
    identify,
    own_rows,
    resample,
)
from hybridflow.workers.mini_batches import MiniBatchPlan


class PPOStep:
    """Everything between generation and the next weights; all that it remembers is in `kl_controller` and
    `exact`.
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
    ) -> None:
        """`exact`: whether rollout and actor are in exact mode, so that the rollout's log-probs are the
        actor's. `leavable`: the context of passes that change no state, where a stopped run may leave the
        step.
        """
        self.leavable = leavable
        self.roles, self.config, self.kl_controller, self.timer = roles, config, kl_controller, timer
        self.side_by_side = Overlap(roles.together, timer)
        # once: a user's file may be edited while the run goes on
        self.estimator, self.loss = (
            find_estimator(config.algorithm),
            find_policy_loss(config.actor_rollout_ref.actor),
        )
        squares = "sum_pi_squared" in self.estimator.needs
        self.dealt_by = dealt_by(config.actor_rollout_ref.actor, roles.actor.mesh.num_parts)
        self.old_log_probs = OldLogProbs(
            roles, config, exact=exact, with_sum_pi_squared=squares, also=self.dealt_by
        )

    def __call__(self, batch: DataProto, step: int) -> tuple[DataProto, Metrics]:
        """Train on `batch` as step number `step` (from 1); gives the batch with all its columns, and the
        metrics.
        """
        roles, algorithm, timer, metrics = self.roles, self.config.algorithm, self.timer, Metrics()
        batch |= identify(batch)  # group_ids, positive
        old = partial(self.old_log_probs, batch, self._first_plan(step), step)
        # old_log_probs; from a pass also entropys, sum_pi_squared
        asked = [Job("actor", "old_log_prob", old)]
        if roles.reference:
            # ref_log_prob
            asked.append(
                Job("reference", "ref", partial(roles.reference.log_probs, batch, also=self.dealt_by))
            )
        if roles.teacher:
            # teacher_log_probs
            asked.append(Job("teacher", "teacher", partial(roles.teacher.log_probs, batch)))
        if roles.critic:
            asked.append(Job("critic", "values", partial(roles.critic.values, batch)))  # values
        with self.leavable():
            found_columns = self.side_by_side(asked)
        for columns in found_columns:
            batch |= columns
        if roles.process_reward:
            with timer("process_reward"):
                batch |= self._process_rewards(batch, step, metrics)  # process_rewards
        with timer("adv"):
            rewards, kl_metrics = apply_kl_penalty(batch, algorithm, self.kl_controller)
            batch |= rewards  # token_level_rewards
            batch = self._correct_rollout(batch, metrics)  # rollout_is_weights, a narrower loss_mask
            batch |= estimate_advantages(batch, self.config, self.estimator)  # advantages, returns
        metrics.update(kl_metrics)
        metrics.update(self._measure(batch))
        if self.loss.keeps_groups:  # a loss over pairs learns from the rows that an estimator paired
            batch.narrow_loss_mask(batch.batch["advantages"] != 0)
        if algorithm.use_pf_ppo:
            batch = resample(batch, algorithm.pf_ppo, generator(self.config.trainer.seed, "pf_ppo", step))
        updates: list[Job[Metrics]] = []
        if roles.critic:
            updates.append(
                Job("critic", "update_critic", partial(roles.critic.update, batch, self._critic_plan(step)))
            )
        if step > self.config.trainer.critic_warmup:
            hook = mini_batch_hook(roles.actor, self.config, self.loss, step)
            watch = self.old_log_probs.watch
            update = partial(
                roles.actor.update,
                batch,
                self._actor_plan(step),
                also=self._loss_columns(batch),
                prepare=hook,
                watch=watch,
            )
            updates.append(Job("actor", "update_actor", update))
        for found in self.side_by_side(updates):
            metrics.update(found)
        self.old_log_probs.after_update(metrics, step)
        if roles.reference and algorithm.ref_update_freq and step % algorithm.ref_update_freq == 0:
            roles.reference.copy_from(roles.actor)
        return batch, metrics

    def _process_rewards(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """q_t of the implicit process reward model, which learns from the outcomes of this batch before or
        after it scores it.
        """
        group, config = self.roles.process_reward, self.config.reward.process_reward_model
        assert group is not None and config.ppo_mini_batch_size is not None, "filled by resolve"
        plan = MiniBatchPlan(config.ppo_mini_batch_size, 1, True, self.config.trainer.seed, step)
        if config.update == "before":
            metrics.update(group.update(batch, plan))
        rewards = group.rewards(batch)
        if config.update == "after":
            metrics.update(group.update(batch, plan))
        return rewards

    def _correct_rollout(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Weights and rejection against the policy that sampled; in bypass mode each mini-batch does this for
        itself.
        """
        correction, taken = self.config.algorithm.rollout_correction, self.old_log_probs.watch
        # the rollout's own log-probs say nothing of the rollout
        if correction.bypass_mode or (taken is not None and not taken.exact):
            return batch
        found = correct_rollout(batch, correction, batch.batch["old_log_probs"])
        metrics.update(found.metrics)
        if found.keep is not None:
            batch.narrow_loss_mask(found.keep)
        return (
            batch
            if found.weights is None
            else batch | DataProto.from_dict({"rollout_is_weights": found.weights})
        )

    def _measure(self, batch: DataProto) -> Metrics:
        mask = batch.batch["loss_mask"]
        metrics = batch_metrics(batch, has_critic=self.roles.critic is not None)
        metrics.update(self.old_log_probs.metrics)
        sampled = mask & own_rows(batch)[:, None]
        if "entropys" in batch and bool(sampled.any()):
            metrics.add_mean("actor/entropy", masked_mean(batch.batch["entropys"], sampled))
        return metrics

    def _loss_columns(self, batch: DataProto) -> list[str]:
        """The columns that this run's loss reads beside those that every loss has."""
        actor, correction = self.config.actor_rollout_ref.actor, self.config.algorithm.rollout_correction
        wanted = {*self.loss.keywords, *self.dealt_by, "rollout_is_weights"}
        wanted |= {"ref_log_prob"} if actor.use_kl_loss else set()
        wanted |= {"group_ids"} if self.loss.keeps_groups else set()  # micro-batches are cut by them
        wanted |= {"positive"} if actor.positive_lm_loss_coef else set()
        wanted |= {"rollout_log_probs", "is_demonstration"} if correction.bypass_mode else set()
        wanted |= {"row_id", "is_demonstration"} if self.old_log_probs.watch else set()
        return sorted(wanted & set(batch.batch.keys()))

    def _first_plan(self, step: int) -> MiniBatchPlan | None:
        """The plan of the step's update, where its mini-batches are of the rows as they were generated."""
        resampled, updates = self.config.algorithm.use_pf_ppo, step > self.config.trainer.critic_warmup
        return self._actor_plan(step) if updates and not resampled else None

    def _actor_plan(self, step: int) -> MiniBatchPlan:
        actor = self.config.actor_rollout_ref.actor
        return MiniBatchPlan(
            actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, self.config.trainer.seed, step
        )

    def _critic_plan(self, step: int) -> MiniBatchPlan:
        critic = self.config.critic
        assert (
            critic.ppo_mini_batch_size is not None
            and critic.ppo_epochs is not None
            and critic.shuffle is not None
        ), "filled by resolve"
        return MiniBatchPlan(
            critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle, self.config.trainer.seed, step
        )
