"""The worker of supervised fine-tuning: the same engine as the actor's, with a likelihood loss."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.controller import Dispatch, register
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import POLICY_COLUMNS
from hybridflow.workers.losses import sft_loss
from hybridflow.workers.state import StatefulGroup, StatefulWorker

SFT_COLUMNS = (*POLICY_COLUMNS, "loss_mask")


class SFTWorker(StatefulWorker):
    """A worker that holds the engine of a model in supervised fine-tuning."""

    def __init__(self, engine: TrainEngine, limits: BatchLimits) -> None:
        super().__init__(engine)
        self.limits = limits
        self.spec = OutputSpec(log_probs=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=SFT_COLUMNS)
    def update(self, batch: DataProto, *, scale: LossScale) -> Metrics:
        """Take one optimizer step on the rows of `batch`; `scale` counts all of them."""
        return self.engine.train_mini_batch(batch, self.spec, sft_loss(scale), self.limits)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=SFT_COLUMNS)
    def evaluate(self, batch: DataProto) -> Metrics:
        """Return `val/loss`, the mean negative log-likelihood in nats of the tokens to learn."""
        log_probs = self.engine.forward(batch, self.spec, self.limits)["log_probs"]
        mask = batch.batch["loss_mask"]
        metrics = Metrics()
        metrics.add_mean("val/loss", -(log_probs * mask).sum(), mask.sum())
        return metrics


class SFTGroup(StatefulGroup[SFTWorker]):
    """The driver's view of the supervised learner."""

    def update(self, batch: DataProto) -> Metrics:
        """See `SFTWorker.update`."""
        return self.call(SFTWorker.update, batch, scale=LossScale.count(batch.batch["loss_mask"]))

    def evaluate(self, batch: DataProto) -> Metrics:
        """See `SFTWorker.evaluate`."""
        return self.call(SFTWorker.evaluate, batch)
