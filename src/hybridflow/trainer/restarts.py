"""Restarts of a run that has lost workers: all are rebuilt, and it resumes from its newest checkpoint.

an attempt ──WorkerLost──► Restarts.after ──► config and patience of the next attempt, or the WorkerLost
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Generic, TypeVar

from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.errors import WorkerLost

logger = logging.getLogger(__name__)

C = TypeVar("C", PPOConfig, SFTConfig)


class Restarts(Generic[C]):
    """What the next attempt of a run starts from."""

    def __init__(self, config: C) -> None:
        self.config: C = config
        self.patience = 0.0
        """Seconds to wait for devices: none at first, as they should be there; a lost node may come back."""
        self._number = 0
        self._saved_before = 0
        if config.trainer.max_restarts:
            self._saved_before = CheckpointStore(config.trainer.default_local_dir).newest_sequence()

    def after(self, lost: WorkerLost) -> None:
        """Set the next attempt to resume from what the run has saved itself; raise `lost` without another."""
        trainer = self.config.trainer
        if self._number == trainer.max_restarts:
            if trainer.max_restarts:
                lost.add_note(f"that was the last of trainer.max_restarts={trainer.max_restarts} restarts")
            raise lost
        self._number += 1
        notes: list[str] = getattr(lost, "__notes__", [])
        logger.error("%s", "\n".join([str(lost), *notes]))
        self.patience = trainer.startup_timeout
        newest = CheckpointStore(trainer.default_local_dir).latest()
        if newest is not None and read_manifest(newest).sequence > self._saved_before:
            self.config = _resuming(self.config, newest)
        where = "its newest checkpoint"
        if self.config.trainer.resume_mode == "disable":
            where = "step 1"
        text = "restart %d of %d: the workers are built anew and the run goes on from %s"
        logger.warning(text, self._number, trainer.max_restarts, where)


def _resuming(config: C, checkpoint: Path) -> C:
    """Return the configuration of the same run, going on from a checkpoint that it has saved itself."""
    trainer = dataclasses.replace(config.trainer, resume_mode="resume_path", resume_from_path=str(checkpoint))
    return dataclasses.replace(config, trainer=trainer)
