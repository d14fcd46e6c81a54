"""The trackers that `trainer.logger` names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.config.convert import raise_all
from hybridflow.config.paths import without_password
from hybridflow.config.trainer import TRACKER_LIBRARIES, BaseTrainerConfig, PrometheusConfig, TrainerConfig
from hybridflow.errors import ConfigError, install_extra
from hybridflow.observability.trackers.adapters import BY_LIBRARY, WebhookTracker
from hybridflow.observability.trackers.base import BackgroundTracker, RunInfo, Tracker, Trackers
from hybridflow.observability.trackers.console import ConsoleTracker
from hybridflow.observability.trackers.jsonl import METRICS_FILE, JsonlTracker, TimelineTracker, read_metrics
from hybridflow.observability.trackers.libraries import check_library, is_installed
from hybridflow.observability.trackers.prometheus import PrometheusTracker, check_port

logger = logging.getLogger(__name__)

TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    **BY_LIBRARY,
}

BY_KEYS: dict[str, Callable[[RunInfo], Tracker]] = {
    "webhook": WebhookTracker,
    "prometheus": PrometheusTracker,
}
"""Trackers that have their own keys."""

IN_PROCESS = ("console", "jsonl")
"""Trackers that the run itself calls; the others have a thread each."""


def check_trackers(trainer: BaseTrainerConfig) -> None:
    """Raise ConfigError for a name in `trainer.logger` that is no tracker, or whose library is not installed,
    too old, or lacks a key that it needs; and where `trainer.prometheus` lacks its own or its port.

    Nothing is imported, so this takes no time. In the default list a missing tensorboard is allowed.
    """
    _known(trainer.logger)
    raise_all(list(tracker_problems(trainer)))
    check_port(trainer.prometheus)


def tracker_problems(trainer: BaseTrainerConfig) -> Iterator[str]:
    """Yield the message of `check_trackers` on each library; names that are no tracker are passed over."""
    names = trainer.logger
    chosen = [names] if isinstance(names, str) else list(names)
    if trainer.prometheus.enable and not is_installed("prometheus_client"):
        yield (
            "trainer.prometheus.enable=true needs prometheus-client, which is not installed: "
            f"{install_extra('prometheus')}, or set trainer.prometheus.enable=false"
        )
    for name in chosen:
        allowed = name == "tensorboard" and chosen == TrainerConfig().logger and not is_installed(name)
        if name not in TRACKER_LIBRARIES or allowed:
            continue
        try:
            check_library(name)
        except ConfigError as error:
            yield str(error)


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
    wandb_proxy: str | None = None,
    alert_webhook: str | None = None,
    prometheus: PrometheusConfig | None = None,
    running: Callable[[], Mapping[str, float]] = dict,
) -> Trackers:
    """Build the trackers of a run, `jsonl` always among them.

    `resume_step` is the step of the checkpoint that the run resumes from (None: a fresh run). `running` gives
    the seconds of the parts of a step that are open, which are watched for stalls. Libraries work
    in their own threads. Of the default list a missing tensorboard is skipped. Raises ConfigError for
    unknown names and missing libraries.
    """
    chosen = _known(names)
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    earlier = {}
    if resume_step is not None:
        found = read_metrics(folder / METRICS_FILE)
        earlier = {step: line for step, line in found.items() if step <= resume_step}
    run = RunInfo(
        folder,
        project,
        experiment,
        _without_passwords(config_dict or {}),
        total_steps,
        resume_step,
        earlier,
        wandb_proxy,
        alert_webhook,
        prometheus,
    )
    by_keys = {
        "webhook": alert_webhook is not None,
        "prometheus": prometheus is not None and prometheus.enable,
    }
    built: list[Tracker] = []
    for name in dict.fromkeys(["jsonl", *chosen, *(name for name, wanted in by_keys.items() if wanted)]):
        try:
            if name in IN_PROCESS:
                built.append(TRACKERS[name](run))
            else:
                built.append(BackgroundTracker(name, partial((TRACKERS | BY_KEYS)[name], run)))
        except ConfigError as error:
            if name != "tensorboard" or chosen != TrainerConfig().logger:
                Trackers(built).close()
                raise
            logger.info("no TensorBoard files: %s", error.__cause__ or error)
    built.append(TimelineTracker(run))
    return Trackers(built, earlier, running)


def _without_passwords(value: Any) -> Any:
    """Leave users and passwords out of addresses, since a tracker's configuration is read by many.

    The address of a webhook is a password as a whole.
    """
    if isinstance(value, Mapping):
        return {
            name: "…" if each and name == "alert_webhook" else _without_passwords(each)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_passwords(each) for each in value]
    if isinstance(value, str):
        return without_password(value)
    return value
