"""Restarts of a run that has lost workers: all are built anew, and it goes on from its newest checkpoint.

run_with_restarts(config, attempt) ──attempt(config, patience)──► result
                  └── a WorkerLost ends an attempt, and the next one resumes
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.errors import WorkerLost

logger = logging.getLogger(__name__)

C = TypeVar("C", PPOConfig, SFTConfig)
T = TypeVar("T")


def run_with_restarts(config: C, attempt: Callable[[C, float], T]) -> T:
    """Return the result of the first attempt that is not stopped by a WorkerLost.

    `attempt` gets the configuration and the seconds that it may wait for devices: none at first, since they
    should be there; a lost node may come back. After a loss the configuration resumes from what the run has
    saved itself. The last allowed WorkerLost comes through, and every other error at once.
    """
    allowed = config.trainer.max_restarts
    saved_before = 0
    if allowed:
        saved_before = CheckpointStore(config.trainer.default_local_dir).newest_sequence()
    patience = 0.0
    for restart in range(1, allowed + 1):
        try:
            return attempt(config, patience)
        except WorkerLost as lost:
            notes: list[str] = getattr(lost, "__notes__", [])
            logger.error("%s", "\n".join([str(lost), *notes]))
        patience = config.trainer.startup_timeout
        newest = CheckpointStore(config.trainer.default_local_dir).latest()
        if newest is not None and read_manifest(newest).sequence > saved_before:
            config = _resuming(config, newest)
        where = "its newest checkpoint"
        if config.trainer.resume_mode == "disable":
            where = "step 1"
        text = "restart %d of %d: the workers are built anew and the run goes on from %s"
        logger.warning(text, restart, allowed, where)
    try:
        return attempt(config, patience)
    except WorkerLost as lost:
        if allowed:
            lost.add_note(f"that was the last of trainer.max_restarts={allowed} restarts")
        raise


def _resuming(config: C, checkpoint: Path) -> C:
    """Return the configuration of the same run, going on from a checkpoint that it has saved itself."""
    trainer = dataclasses.replace(config.trainer, resume_mode="resume_path", resume_from_path=str(checkpoint))
    return dataclasses.replace(config, trainer=trainer)
