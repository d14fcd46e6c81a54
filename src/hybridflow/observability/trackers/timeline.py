"""`timeline.jsonl` in the run folder: what ran when in each step, by pool of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.observability.step_lines import StepLines
from hybridflow.observability.timeline import ROLES, TimeSpan, timeline
from hybridflow.observability.trackers.base import Outcome, RunInfo, Tracker


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

    def close(self, outcome: Outcome = "finished") -> None:
        timeline.stop()


def lanes_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the lane of each role: the pools that it is in, or all devices where the run has one pool."""
    trainer = config.get("trainer", {})
    pools = trainer.get("resource_pools") or {}
    placement = trainer.get("placement") or {}
    lanes = {}
    for role in dict.fromkeys(ROLES.values()):
        lanes[role] = "devices"
        if pools:
            named = placement.get(role, next(iter(pools)))
            names = [named] if isinstance(named, str) else named
            lanes[role] = "pool " + ", ".join(names)
    return lanes
