"""The implicit process reward model of PRIME, and its typed group.

    input_ids, ref_log_prob ──rewards──► process_rewards q_t = β (log π_rm − log π_ref)
    …, positive             ──update───► the model's weights, by cross-entropy of
                                         σ(β Σ_t (log π_rm − log π_ref)) against the outcome

It is a policy that learns from outcomes which tokens led to them. A response is judged by all of its sampled
tokens: a narrower `loss_mask` leaves out whole rows, never tokens of a row.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.process_reward import implicit_rewards, process_reward_loss
from hybridflow.config.reward import ProcessRewardModelConfig
from hybridflow.controller import Dispatch, register
from hybridflow.engines import BatchLimits, LossFn, OutputSpec, TrainEngine
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import POLICY_COLUMNS, UPDATE_COLUMNS
from hybridflow.workers.losses import of_micro_batch, ratios
from hybridflow.workers.mini_batches import MiniBatchPlan, add_update, mini_batches
from hybridflow.workers.reference import check_token_ids
from hybridflow.workers.state import StatefulGroup, StatefulWorker


def outcome_loss(beta: float, scale: LossScale) -> LossFn:
    """Return the cross-entropy against the outcome on a micro-batch, the mean over the trajectories of its
    mini-batch.
    """

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        rows = micro.batch
        mask = rows["response_mask"] & rows["loss_mask"].any(-1, keepdim=True)
        out = process_reward_loss(
            outputs["log_probs"],
            rows["ref_log_prob"],
            mask,
            rows["positive"],
            of_micro_batch(scale, micro),
            beta=beta,
        )
        metrics = ratios(out.metrics)
        metrics.add_sum("process_reward/loss", out.loss.detach())
        return out.loss, metrics

    return loss


class ProcessRewardWorker(StatefulWorker):
    """A worker that holds the reward model's engine."""

    def __init__(
        self,
        engine: TrainEngine,
        config: ProcessRewardModelConfig,
        *,
        temperature: float,
        limits: BatchLimits,
    ) -> None:
        super().__init__(engine)
        self.config = config
        self.limits = limits
        self.spec = OutputSpec(log_probs=True, temperature=temperature)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=(*POLICY_COLUMNS, "ref_log_prob"),
        writes=("process_rewards",),
    )
    def rewards(self, batch: DataProto) -> DataProto:
        """Return process_rewards [B, R] float32, 0 outside `response_mask`, under the current weights."""
        check_token_ids(batch, self.engine)
        log_prob = self.engine.forward(batch, self.spec, self.limits)["log_probs"]
        rows = batch.batch
        config = self.config
        rewards = implicit_rewards(
            log_prob,
            rows["ref_log_prob"],
            rows["response_mask"],
            beta=config.beta,
            granularity=config.granularity,
        )
        return DataProto.from_dict({"process_rewards": rewards})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=(*UPDATE_COLUMNS, "ref_log_prob", "positive"))
    def update_mini_batch(self, batch: DataProto, *, scale: LossScale) -> Metrics:
        """Take one optimizer step on the rows of one mini-batch; `scale` counts all of it."""
        check_token_ids(batch, self.engine)
        return self.engine.train_mini_batch(
            batch, self.spec, outcome_loss(self.config.beta, scale), self.limits
        )


class ProcessRewardGroup(StatefulGroup[ProcessRewardWorker]):
    """The driver's view of the process reward model."""

    def rewards(self, batch: DataProto) -> DataProto:
        """See `ProcessRewardWorker.rewards`."""
        return self.call(ProcessRewardWorker.rewards, batch)

    def update(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take an optimizer step for each mini-batch of each epoch."""
        rows = self.columns_read(ProcessRewardWorker.update_mini_batch, batch)
        metrics = Metrics()
        for mini, scale in mini_batches(rows, plan, metrics, name="process_reward"):
            add_update(metrics, self.call(ProcessRewardWorker.update_mini_batch, mini, scale=scale))
        return metrics
