"""Checks of a run that need more than its keys but no torch, so that a mistake shows after about a second."""

from __future__ import annotations

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.data.early_checks import check_data
from hybridflow.observability.trackers.build import check_trackers
from hybridflow.rewards.early_checks import check_reward
from hybridflow.trainer.run_folder import RunFolder


def check_before_torch(config: PPOConfig | SFTConfig) -> None:
    """Raise an error of the user's for what can be seen now and would stop the run later.

    That is data and a reward that do not fit each other, a tracker that is not installed, and a run folder
    that cannot be written.
    """
    splits = check_data(config)
    if isinstance(config, PPOConfig):
        check_reward(config, splits)
    check_trackers(config.trainer.logger)
    RunFolder(config.trainer.default_local_dir).check_writable()
