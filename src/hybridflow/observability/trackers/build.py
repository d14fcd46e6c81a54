"""The trackers that `trainer.logger` names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridflow.config.trainer import TrainerConfig
from hybridflow.errors import ConfigError, install_extra
from hybridflow.observability.trackers.base import RunInfo, Tracker, Trackers
from hybridflow.observability.trackers.console import ConsoleTracker
from hybridflow.observability.trackers.jsonl import JsonlTracker
from hybridflow.observability.trackers.mlflow import MlflowTracker
from hybridflow.observability.trackers.swanlab import SwanlabTracker
from hybridflow.observability.trackers.tensorboard import TensorBoardTracker
from hybridflow.observability.trackers.wandb import WandbTracker

logger = logging.getLogger(__name__)

TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
}


LIBRARIES = ("tensorboard", "wandb", "mlflow", "swanlab")
"""Trackers that need a library, which has their name."""


def check_trackers(names: str | Sequence[str]) -> None:
    """Raise ConfigError for a name in `trainer.logger` that is no tracker or whose library is not installed.

    Nothing is imported, so this takes no time. In the default list a missing tensorboard is allowed.
    """
    chosen = _known(names)
    for name in chosen:
        if name == "tensorboard" and chosen == TrainerConfig().logger:
            continue
        if name in LIBRARIES and not _is_installed(name):
            raise ConfigError(
                f"trainer.logger lists {name!r}, and {name} is not installed: "
                f"{install_extra(name)}, or take {name!r} out of trainer.logger"
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # set to None in sys.modules
        return False


def _known(names: str | Sequence[str]) -> list[str]:
    chosen = [names] if isinstance(names, str) else list(names)
    for name in chosen:
        if name not in TRACKERS:
            raise ConfigError(f"trainer.logger: {name!r} is no tracker: use some of {', '.join(TRACKERS)}")
    return chosen


def build_trackers(
    names: str | Sequence[str],
    run_dir: str | Path,
    project: str = "hybridflow",
    experiment: str = "run",
    config_dict: Mapping[str, Any] | None = None,
    *,
    total_steps: int | None = None,
    resume_step: int | None = None,
) -> Trackers:
    """Build the trackers of a run, `jsonl` always among them.

    `resume_step` is the step of the checkpoint that the run goes on from (None: a fresh run). Of the default
    list a missing tensorboard is skipped. Raises ConfigError for unknown names and missing libraries.
    """
    chosen = _known(names)
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunInfo(folder, project, experiment, config_dict or {}, total_steps, resume_step)
    built: list[Tracker] = []
    for name in dict.fromkeys(["jsonl", *chosen]):
        try:
            built.append(TRACKERS[name](run))
        except ConfigError as error:
            if name != "tensorboard" or chosen != TrainerConfig().logger:
                Trackers(built).close()
                raise
            logger.info("no TensorBoard files: %s", error.__cause__ or error)
    return Trackers(built)
