"""`metrics.jsonl` in the run folder: a JSON object a step, with exact floats, NaN and Infinity."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from hybridflow.observability.trackers.base import Outcome, RunInfo, Tracker

METRICS_FILE = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Writes each step once, joins what is logged again, and drops later steps after a resume.

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


def _encode(step: int, metrics: Mapping[str, float]) -> bytes:
    return (json.dumps({"step": step, **metrics}, default=float) + "\n").encode("utf-8")
