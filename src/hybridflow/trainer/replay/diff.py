"""The first quantity in which two runs differ: `hybridflow diff RUN_A RUN_B`.

config.yaml ─► of each step: kept rows ─► metrics.jsonl ─► checkpoint ─► the next step
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import step_folders, step_of
from hybridflow.config.tree import flatten
from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.glossary import find
from hybridflow.observability.report.files import read_yaml
from hybridflow.observability.trackers.jsonl import METRICS_FILE, read_metrics
from hybridflow.trainer.replay.compare_checkpoints import checkpoint_differences
from hybridflow.trainer.replay.compare_rows import row_differences
from hybridflow.trainer.replay.difference import MISSING, Difference, first_unequal
from hybridflow.trainer.replay.kept_rows import HOW_TO_KEEP, KeptRows

NAMES_AND_OUTPUT = {
    "data.cache_dir",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.wandb_proxy",
    "trainer.save_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.remote_checkpoint_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.esi_redundant_time",
    "trainer.keep_rows",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.log_val_generations",
    "trainer.worker_timeout",
    "trainer.heartbeat_timeout",
    "trainer.startup_timeout",
    "trainer.max_restarts",
}
"""Keys that change no number of a run."""

OF_THE_WAY = (
    "timing_s/",
    "fully_async/",
    "perf/",
    "rollout/",
    "reward/seconds",
    "reward/num_cached",
    "reward/num_retries",
    "checkpoint/",
    "agent/max_concurrent",
    "agent/num_preempted",
    "agent/processes/",
)
"""Metrics of how the work was done, which no two runs share, by the beginnings of their names."""


@dataclass
class RunDiff:
    """What two runs were found to differ in."""

    differences: list[Difference] = field(default_factory=list)
    """All differing keys, then the first difference of each further kind, in causal order."""
    compared: dict[str, int] = field(default_factory=dict)
    """How much of each kind was compared: keys, steps with rows, steps with metrics, checkpoints."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    @property
    def status(self) -> int:
        """0: equal in all that was compared; 1: different; 2: nothing of a step could be compared."""
        if self.differences:
            return 1
        return 0 if self.compared["metric lines"] or self.compared["steps with rows"] else 2


def diff_runs(first: Path, second: Path) -> RunDiff:
    """Compare two run folders. Raises ConfigError for a folder that is none."""
    found = RunDiff()
    configs = [_config(run) for run in (first, second)]
    found.compared["keys"] = len(configs[0].keys() | configs[1].keys())
    found.differences += _config_differences(configs[0], configs[1])
    _note_machines(first, second, found)
    seen: set[str] = set()
    for difference in _step_differences(first, second, found):
        if difference.kind not in seen:
            seen.add(difference.kind)
            found.differences.append(difference)
    return found


def repeatable(name: str) -> bool:
    """Return whether two runs that compute the same log the same value of this metric."""
    if name == "perf/total_num_tokens":
        return True
    entry = find(name)
    return not (name.startswith(OF_THE_WAY) or (entry is not None and entry.unit == "s"))


def metric_differences(
    first: dict[str, float], second: dict[str, float], step: int, names: Iterator[str] | None = None
) -> Iterator[Difference]:
    """Give the repeatable metrics (those in `names`, or all) in which two lines of a step differ."""
    wanted = dict.fromkeys([*first, *second]) if names is None else dict.fromkeys(names)
    for name in filter(repeatable, wanted):
        one = first.get(name, MISSING)
        other = second.get(name, MISSING)
        if first_unequal(one, other) is not None:
            yield Difference("metric", name, one, other, step)


def _config(run: Path) -> dict[str, Any]:
    try:
        return dict(flatten(read_yaml(run / "config.yaml")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run} is no run folder (trainer.default_local_dir of a run): {error}") from error


def _config_differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*first, *second]):
        if key in NAMES_AND_OUTPUT:
            continue
        one = first.get(key, MISSING)
        other = second.get(key, MISSING)
        if first_unequal(one, other) is not None:
            yield Difference("config", key, one, other)


def _note_machines(first: Path, second: Path, found: RunDiff) -> None:
    """Add a note where the machines differ, which explains differences in the last bits."""
    facts = []
    for run in (first, second):
        try:
            facts.append(json.loads((run / "machine.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return
    for name in facts[0]:
        if facts[0][name] != facts[1].get(name):
            values = f"{facts[0][name]} and {facts[1].get(name)}"
            found.notes.append(f"other machines: {name} is {values}, so last bits may differ")


def _step_differences(first: Path, second: Path, found: RunDiff) -> Iterator[Difference]:
    runs = (first, second)
    metrics = [read_metrics(run / METRICS_FILE) for run in runs]
    kept = [KeptRows(run) for run in runs]
    rows = [set(one.steps()) for one in kept]
    saved = [{step_of(folder) or 0: folder for folder in step_folders(run)} for run in runs]
    found.compared |= {"steps with rows": 0, "metric lines": 0, "checkpoints": 0}
    _note_missing(runs, metrics, rows, saved, found)
    for step in sorted({*metrics[0], *metrics[1], *rows[0], *rows[1], *saved[0], *saved[1]}):
        if step in rows[0] & rows[1]:
            try:
                steps = [one.read(step) for one in kept]
                found.compared["steps with rows"] += 1
                yield from row_differences(steps[0], steps[1])
            except DataError as error:
                found.notes.append(f"not compared: {error}")
        if step in metrics[0].keys() & metrics[1].keys():
            found.compared["metric lines"] += 1
            yield from metric_differences(metrics[0][step], metrics[1][step], step)
        if step in saved[0].keys() & saved[1].keys():
            found.compared["checkpoints"] += 1
            yield from checkpoint_differences(saved[0][step], saved[1][step], step, found.notes)


def _note_missing(
    runs: tuple[Path, Path],
    metrics: list[dict[int, dict[str, float]]],
    rows: list[set[int]],
    saved: list[dict[int, Path]],
    found: RunDiff,
) -> None:
    """Say which steps only one of the runs has something of."""
    advice = {"metrics": "", "rows": f": {HOW_TO_KEEP}", "checkpoints": ": set trainer.save_freq"}
    lists = {
        "metrics": [set(steps) for steps in metrics],
        "rows": rows,
        "checkpoints": [set(steps) for steps in saved],
    }
    for what, (ours, theirs) in lists.items():
        if not ours and not theirs:
            found.notes.append(f"neither run has {what}{advice[what]}")
        for run, has, other in ((runs[0], ours, theirs), (runs[1], theirs, ours)):
            if other - has:
                steps = ", ".join(map(str, sorted(other - has)[:8]))
                more = ", …" if len(other - has) > 8 else ""
                found.notes.append(f"{run} has no {what} of steps {steps}{more}{advice[what]}")
