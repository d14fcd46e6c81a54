"""The teacher of on-policy distillation: a frozen policy of the actor's vocabulary that scores the actor's
samples.

Its worker is a `ReferenceWorker` whose column is `teacher_log_probs`.
"""

from __future__ import annotations

from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto
from hybridflow.workers.reference import ReferenceWorker

TEACHER_COLUMN = "teacher_log_probs"


class TeacherGroup(WorkerGroup[ReferenceWorker]):
    """The driver's view of the teacher."""

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return teacher_log_probs [B, R] float32, nats, at the rollout's temperature."""
        return self.call(ReferenceWorker.log_probs, batch)
