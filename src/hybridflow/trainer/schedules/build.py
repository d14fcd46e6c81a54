"""The source that a run's schedule asks for."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config import PPOConfig
from hybridflow.config.trainer import EXACT_SCHEDULES
from hybridflow.trainer.ppo.skip import DumpedSource
from hybridflow.trainer.ppo.sync import SourceParts, SyncSource
from hybridflow.trainer.schedules.continuous import ContinuousSource
from hybridflow.trainer.schedules.exact import ExactSource
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger
from hybridflow.trainer.schedules.schedule import Schedule


def make_source(
    config: PPOConfig,
    parts: SourceParts,
    total_steps: int,
    folder: Path,
) -> SyncSource:
    """Return the source of `trainer.schedule`, or that of dumped rollouts (`rollout.skip`).

    `folder` is the run's, which has the ledger.
    """
    name = config.trainer.schedule
    keys = config.trainer.async_
    if config.actor_rollout_ref.rollout.skip.enable:
        return DumpedSource(parts)
    if name == "sync":
        return SyncSource(parts)
    ledger = Ledger.open(folder / LEDGER_FILE)
    if ledger.position:
        ledger.rewind(0)  # a run that goes on rewinds to its checkpoint's position, which stays possible
    if name in EXACT_SCHEDULES:
        return ExactSource(
            parts,
            run_ahead=int(keys.run_ahead),
            total_steps=total_steps,
            ledger=ledger,
        )
    assert keys.max_staleness is not None, "filled by resolve"
    return ContinuousSource(
        parts,
        schedule=Schedule(config.data.train_batch_size, keys.run_ahead, keys.max_staleness, total_steps),
        ledger=ledger,
        partial=keys.partial_rollout,
        max_concurrent=keys.max_concurrent_groups,
    )
