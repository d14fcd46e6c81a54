"""The source that a run's schedule asks for."""

from __future__ import annotations

from hybridflow.config import PPOConfig
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.observability.timing import Timer
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.trainer.ppo.sync import SyncSource
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.schedules.exact import ExactSource


def make_source(
    config: PPOConfig,
    loader: StatefulLoader[PromptRow],
    trajectories: Trajectories,
    roles: Roles,
    timer: Timer,
    total_steps: int,
) -> SyncSource:
    """Return the source of `trainer.schedule`; it makes rows by `trajectories` and measures with `timer`."""
    name = config.trainer.schedule
    if name == "sync":
        return SyncSource(loader, trajectories, roles, timer)
    run_ahead = 1
    if name == "exact_async":
        run_ahead = int(config.trainer.async_.run_ahead)
    return ExactSource(loader, trajectories, roles, timer, run_ahead=run_ahead, total_steps=total_steps)
