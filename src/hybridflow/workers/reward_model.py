"""The reward model: a sequence or token classifier that scores texts and never learns; its typed group.

rows of the model's own tokens ──score──► reward_model_scores
"""

from __future__ import annotations

from hybridflow.controller import Dispatch, Worker, WorkerGroup, register
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import POLICY_COLUMNS

SCORES = "reward_model_scores"


class RewardModelWorker(Worker):
    """A worker that holds the reward model's engine."""

    def __init__(self, engine: TrainEngine, *, limits: BatchLimits) -> None:
        super().__init__()
        self.engine = engine
        self.limits = limits

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=POLICY_COLUMNS, writes=(SCORES,))
    def score(self, batch: DataProto) -> DataProto:
        """Return reward_model_scores [B, R] float32, as `OutputSpec.scores` says."""
        scores = self.engine.forward(batch, OutputSpec(scores=True), self.limits)["scores"]
        return DataProto.from_dict({SCORES: scores.float()})


class RewardModelGroup(WorkerGroup[RewardModelWorker]):
    """The driver's view of the reward model."""

    def score(self, batch: DataProto) -> DataProto:
        """See `RewardModelWorker.score`."""
        return self.call(RewardModelWorker.score, batch)
