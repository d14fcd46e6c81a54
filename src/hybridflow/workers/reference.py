"""The reference policy: frozen, what the actor is held to by a KL term."""

from __future__ import annotations

from hybridflow.controller import Dispatch, Worker, WorkerGroup, register
from hybridflow.engines import BatchLimits, TrainEngine
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import POLICY_COLUMNS, policy_forward


class ReferenceWorker(Worker):
    """Holds a policy without an optimizer."""

    def __init__(self, engine: TrainEngine, *, temperature: float, limits: BatchLimits) -> None:
        self.engine, self.temperature, self.limits = engine, temperature, limits

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def log_probs(self, batch: DataProto) -> DataProto:
        """ref_log_prob [B, R] float32 nats."""
        outputs = self.engine.forward(batch, policy_forward(self.temperature, with_entropy=False), self.limits)
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})


class ReferenceGroup(WorkerGroup[ReferenceWorker]):
    """The driver's view of the reference."""

    def log_probs(self, batch: DataProto) -> DataProto:
        """See `ReferenceWorker.log_probs`."""
        return self.call(ReferenceWorker.log_probs, batch.select([*POLICY_COLUMNS], []))
