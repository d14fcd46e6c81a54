"""One PPO step, shared by every schedule: from scored trajectories to updated weights.

Read it as the algorithm. The right margin names the columns that each line adds to the batch.
"""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossScale, aggregate
from hybridflow.config import PPOConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.data_metrics import batch_metrics, rollout_difference
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.workers.bridge import KLController, apply_kl_penalty, estimate_advantages, find_estimator
from hybridflow.workers.mini_batches import MiniBatchPlan


class PPOStep:
    """Everything between generation and the next weights; `kl_controller` is the only thing it remembers."""

    def __init__(self, roles: Roles, config: PPOConfig, kl_controller: KLController, timer: Timer) -> None:
        self.roles, self.config, self.kl_controller, self.timer = roles, config, kl_controller, timer
        self.estimator = find_estimator(config.algorithm.adv_estimator)  # once: a user's file may be edited while the run goes on

    def __call__(self, batch: DataProto, step: int) -> tuple[DataProto, Metrics]:
        """Train on `batch` as step number `step` (from 1); gives the batch with all its columns, and the metrics."""
        roles, algorithm, actor, timer = self.roles, self.config.algorithm, self.config.actor_rollout_ref.actor, self.timer
        metrics = Metrics()
        with timer("old_log_prob"):
            batch |= roles.actor.log_probs(batch)  # old_log_probs, entropys
        if roles.reference:
            with timer("ref"):
                batch |= roles.reference.log_probs(batch)  # ref_log_prob
        if roles.critic:
            with timer("values"):
                batch |= roles.critic.values(batch)  # values
        with timer("adv"):
            rewards, kl_metrics = apply_kl_penalty(batch, algorithm, self.kl_controller)
            batch |= rewards  # token_level_rewards
            batch |= estimate_advantages(batch, algorithm, self.estimator)  # advantages, returns
        metrics.update(kl_metrics)
        metrics.update(rollout_difference(batch))
        metrics.update(batch_metrics(batch, has_critic=roles.critic is not None))
        mask = batch.batch["loss_mask"]
        mode = actor.loss_agg_mode or "token-mean"
        entropy = aggregate(batch.batch["entropys"], mask, mode, LossScale.count(mask), actor.loss_scale_factor)
        metrics.add_mean("actor/entropy", entropy)
        if roles.critic:
            with timer("update_critic"):
                metrics.update(roles.critic.update(batch, self._critic_plan(step)))
        if step > self.config.trainer.critic_warmup:
            with timer("update_actor"):
                metrics.update(roles.actor.update(batch, self._actor_plan(step)))
        return batch, metrics

    def _actor_plan(self, step: int) -> MiniBatchPlan:
        actor = self.config.actor_rollout_ref.actor
        return MiniBatchPlan(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, self.config.trainer.seed, step)

    def _critic_plan(self, step: int) -> MiniBatchPlan:
        critic = self.config.critic
        assert critic.ppo_mini_batch_size is not None and critic.ppo_epochs is not None and critic.shuffle is not None, "filled by resolve"
        return MiniBatchPlan(critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle, self.config.trainer.seed, step)
