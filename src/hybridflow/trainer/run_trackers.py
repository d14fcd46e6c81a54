"""The trackers of a run, by its `trainer.*` keys."""

from __future__ import annotations

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.tree import to_tree
from hybridflow.observability.trackers import Trackers, build_trackers
from hybridflow.trainer.run_folder import RunFolder


def run_trackers(config: PPOConfig | SFTConfig, folder: RunFolder, total_steps: int, done: int) -> Trackers:
    """Build the trackers of a run; `done` is the number of steps before a resume, 0 for a fresh run."""
    trainer = config.trainer
    return build_trackers(
        trainer.logger,
        folder.path,
        trainer.project_name,
        trainer.experiment_name,
        to_tree(config),
        total_steps=total_steps,
        resume_step=done or None,
    )
