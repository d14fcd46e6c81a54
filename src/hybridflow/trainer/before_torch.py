"""Checks of a run that need more than its keys but no torch, so that a mistake shows after about a second."""

from __future__ import annotations

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.observability.trackers.build import check_trackers
from hybridflow.trainer.run_folder import RunFolder


def check_before_torch(config: PPOConfig | SFTConfig) -> None:
    """Raise ConfigError for a tracker that is not installed and a run folder that cannot be written."""
    check_trackers(config.trainer.logger)
    RunFolder(config.trainer.default_local_dir).check_writable()
