"""Files of the run folder with a JSON object a step.

`metrics.jsonl` has the metrics, with exact floats, NaN and Infinity; `timeline.jsonl` what ran when, by pool
of devices. Readers follow them while they grow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.layout import VALIDATION
from hybridflow.observability.timing import ROLES, TimeSpan, timeline
from hybridflow.observability.trackers.base import Outcome, RunInfo, Tracker

METRICS_FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Writes each step once, joins what is logged again, and drops later steps after a resume. What comes
    late has a line of its own, which readers join with its step's.

    A fresh run in a used folder moves the old file to `metrics.previous.jsonl`.
    """

    def __init__(self, run: RunInfo) -> None:
        self.path = run.run_dir / METRICS_FILE
        if run.resume_step is None:
            if self.path.exists():
                os.replace(self.path, self.path.with_name("metrics.previous.jsonl"))
            kept: dict[int, dict[str, float]] = {}
        else:
            kept = {step: line for step, line in read_metrics(self.path).items() if step <= run.resume_step}
        partial = self.path.with_suffix(".jsonl.partial")
        partial.write_bytes(b"".join(_encode(step, kept[step]) for step in sorted(kept)))
        os.replace(partial, self.path)
        self._step = max(kept, default=-1)
        self._line = dict(kept.get(self._step, {}))
        self._offset = self.path.stat().st_size
        if kept:
            self._offset -= len(_encode(self._step, self._line))
        self._file = self.path.open("r+b")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert step >= self._step, f"step {step} is logged after step {self._step}: steps must not go back"
        if step > self._step:
            self._offset = self._file.seek(0, os.SEEK_END)
            self._step = step
            self._line = {}
        self._line.update(metrics)
        self._file.seek(self._offset)
        self._file.write(_encode(step, self._line))
        self._file.truncate()
        self._file.flush()

    def log_late(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(_encode(step, metrics))
        self._file.flush()
        self._offset = self._file.tell()  # what is logged of the newest step again has another line, too
        self._line = {}

    def close(self, outcome: Outcome = "finished") -> None:
        self._file.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a `metrics.jsonl` by step; torn lines are left out, lines of one step joined."""
    steps: dict[int, dict[str, float]] = {}
    if not path.exists():
        return steps
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            steps.setdefault(int(line.pop("step")), {}).update(line)
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
    return steps


def has_validation_of(run_dir: Path, step: int) -> bool:
    """Return whether the run in this folder has logged a validation of the weights after `step` steps."""
    line = read_metrics(run_dir / METRICS_FILE).get(step, {})
    return any(name.startswith("val-") for name in line)


def _encode(step: int, metrics: Mapping[str, float]) -> bytes:
    return (json.dumps({"step": step, **metrics}, default=float) + "\n").encode("utf-8")


class StepLines:
    """Appends lines to a file that appears with the first one; what is written of a step last holds.

    Lines of steps after `keep_to` are of a run that is replaced, and are dropped.
    """

    def __init__(self, path: Path, keep_to: int) -> None:
        self.path = path
        if not path.exists():
            return
        kept = [line for line in path.read_bytes().splitlines(keepends=True) if _step(line) <= keep_to]
        partial = path.with_suffix(".jsonl.partial")
        partial.write_bytes(b"".join(kept))
        os.replace(partial, path)

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Append the line of a step in one piece."""
        text = json.dumps({"step": step, **line}, ensure_ascii=False, separators=(",", ":"))
        with self.path.open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace") + b"\n")


def _step(line: bytes) -> float:
    """Return the step of a line; one that is torn is of no step that is kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TimelineTracker(Tracker):
    """Writes the spans of each step once it is logged, and again where more of it is logged later."""

    def __init__(self, run: RunInfo) -> None:
        self._lines = StepLines(
            run.run_dir / "timeline.jsonl", -1 if run.resume_step is None else run.resume_step
        )
        self._lanes = lanes_of(run.config)
        self._step = -1
        self._spans: list[TimeSpan] = []
        timeline.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step != self._step:
            self._spans = []
            self._step = step
        new: list[TimeSpan] = [
            (self._lanes.get(lane, lane), name, start, end) for lane, name, start, end in timeline.take()
        ]
        if new:
            self._spans += new
            self._lines.write(step, {"spans": self._spans})

    def log_late(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing: spans are those of the step that is running."""

    def close(self, outcome: Outcome = "finished") -> None:
        timeline.stop()


def lanes_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the lane of each role: the pools that it is in, or all devices where the run has one pool."""
    trainer = config.get("trainer", {})
    pools = trainer.get("resource_pools") or {}
    placement = trainer.get("placement") or {}
    lanes = {}
    for role in dict.fromkeys((*ROLES.values(), VALIDATION)):
        lanes[role] = "devices"
        if pools:
            named = placement.get(role, next(iter(pools)))
            names = [named] if isinstance(named, str) else named
            lanes[role] = "pool " + ", ".join(names)
    return lanes
