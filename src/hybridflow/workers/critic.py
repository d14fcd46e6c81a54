"""The critic: the value model of PPO, and its typed group."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config.root import CriticConfig
from hybridflow.controller import Dispatch, register
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import POLICY_COLUMNS, UPDATE_COLUMNS
from hybridflow.workers.losses import critic_loss
from hybridflow.workers.mini_batches import MiniBatchPlan, add_update, mini_batches
from hybridflow.workers.state import StatefulGroup, StatefulWorker

VALUES = OutputSpec(values=True)


class CriticWorker(StatefulWorker):
    """A worker that holds the value model's engine."""

    def __init__(
        self,
        engine: TrainEngine,
        config: CriticConfig,
        *,
        forward_limits: BatchLimits,
        loss_scale_factor: float | None,
    ) -> None:
        super().__init__(engine)
        self.config = config
        self.forward_limits = forward_limits
        self.loss_scale_factor = loss_scale_factor
        self.limits = BatchLimits(config.ppo_max_token_len_per_gpu, config.ppo_micro_batch_size_per_gpu)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=POLICY_COLUMNS, writes=("values",))
    def values(self, batch: DataProto) -> DataProto:
        """Return values [B, R] float32: the return expected in the state in which each response token is
        chosen.
        """
        return DataProto.from_dict(self.engine.forward(batch, VALUES, self.forward_limits))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=(*UPDATE_COLUMNS, "values", "returns"))
    def update_mini_batch(self, batch: DataProto, *, scale: LossScale) -> Metrics:
        """Take one optimizer step on the rows of one mini-batch; `scale` counts all of it."""
        loss = critic_loss(self.config, scale, self.loss_scale_factor)
        return self.engine.train_mini_batch(batch, VALUES, loss, self.limits)


class CriticGroup(StatefulGroup[CriticWorker]):
    """The driver's view of the critic."""

    def values(self, batch: DataProto) -> DataProto:
        """See `CriticWorker.values`."""
        return self.call(CriticWorker.values, batch)

    def keep_values(self, batch: DataProto) -> DataProto:
        """Compute values as `values` does, and leave them with the workers."""
        return self.call_and_keep(CriticWorker.values, ["values"], batch)

    def update(self, batch: DataProto, plan: MiniBatchPlan) -> Metrics:
        """Take an optimizer step for each mini-batch of each epoch."""
        rows = self.columns_read(CriticWorker.update_mini_batch, batch)
        metrics = Metrics()
        for mini, scale in mini_batches(rows, plan, metrics, name="critic"):
            add_update(metrics, self.call(CriticWorker.update_mini_batch, mini, scale=scale))
        return metrics
