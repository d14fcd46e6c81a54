"""Restarts of a run that has lost a worker process or a node: all workers are built anew and the run goes on
from its newest checkpoint, as often as `trainer.max_restarts` allows.

    for attempt in Attempts(config):
        with attempt, build(attempt.config, attempt.patience) as trainer:
            trainer.fit()                    # a WorkerLost ends this attempt, and the next one resumes
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.errors import WorkerLost

logger = logging.getLogger(__name__)

C = TypeVar("C", PPOConfig, SFTConfig)


class Attempts(Generic[C]):
    """Iterate, and run inside the context of what comes: it ends after the first attempt that is not stopped
    by a WorkerLost.

    The last allowed WorkerLost comes through, and every other error at once.
    """

    def __init__(self, config: C) -> None:
        self.config: C = config
        """Configuration of the coming attempt; after a loss it resumes from what the run has saved itself."""
        self.patience = 0.0
        """Seconds that the coming attempt may wait for devices: none at first, since they should be there; a
        lost node may come back.
        """
        self._allowed = config.trainer.max_restarts
        self._lost = 0
        self._done = False
        self._before = 0
        if self._allowed:
            self._before = CheckpointStore(config.trainer.default_local_dir).newest_sequence()

    def __iter__(self) -> Iterator[Attempts[C]]:
        while not self._done:
            yield self

    def __enter__(self) -> None:
        self._done = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, WorkerLost):
            return False
        if self._lost == self._allowed:
            if self._allowed:
                error.add_note(f"that was the last of trainer.max_restarts={self._allowed} restarts")
            return False
        self._lost += 1
        self._done = False
        self.patience = self.config.trainer.startup_timeout
        newest = CheckpointStore(self.config.trainer.default_local_dir).latest()
        if newest is not None and read_manifest(newest).sequence > self._before:
            self.config = _resuming(self.config, newest)
        logger.error("%s", error)
        where = "its newest checkpoint"
        if self.config.trainer.resume_mode == "disable":
            where = "step 1"
        logger.warning(
            "restart %d of %d: the workers are built anew and the run goes on from %s",
            self._lost,
            self._allowed,
            where,
        )
        return True


def _resuming(config: C, checkpoint: Path) -> C:
    """Return the configuration of the same run, going on from a checkpoint that it has saved itself."""
    trainer = dataclasses.replace(config.trainer, resume_mode="resume_path", resume_from_path=str(checkpoint))
    return dataclasses.replace(config, trainer=trainer)
