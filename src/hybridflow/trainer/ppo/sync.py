"""The synchronous schedule: each batch is generated when it is asked for, with the newest weights.

loader ──prompts──► Trajectories ──scored rows──► TrainBatch
                         ▲
   actor ──weights──► rollout
"""

from __future__ import annotations

from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.observability.timing import Timer
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.source import LoaderSource, TrainBatch


class SyncSource(LoaderSource[PromptRow]):
    """Generates and scores a batch between two updates, in the trainer's thread."""

    def __init__(
        self, loader: StatefulLoader[PromptRow], trajectories: Trajectories, roles: Roles, timer: Timer
    ) -> None:
        """Read prompts from `loader` and make rows of them by `trajectories`, which measures with `timer`."""
        super().__init__(loader)
        self.trajectories = trajectories
        self.roles = roles
        self.timer = timer

    def next(self, step: int) -> TrainBatch:
        """Generate and score the batch of step number `step` with the weights that were published last."""
        epoch = self.loader.epoch  # read first: with an epoch's last batch the loader moves on
        self.timer.reset()
        rows, metrics = self.trajectories.for_training(self.batches(), step)
        return TrainBatch(rows, epoch, metrics, self.timer.as_metrics())

    def publish(self, version: int) -> None:
        """Push the actor's weights into every replica that has its own."""
        self.roles.rollout.update_from(self.roles.actor, version)
