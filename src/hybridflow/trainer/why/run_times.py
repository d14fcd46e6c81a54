"""The times and counts of a run, read from its folder: what the rules about its waits look at.

    config.yaml, metrics.jsonl, rollouts.jsonl, timeline.jsonl ──RunTimes.read──► RunTimes
    RunTimes, changed keys ──saving──► seconds of a phase, by the planner's model

Seconds are those of a mean step after the first, which also builds caches and kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.tree import with_values
from hybridflow.errors import DataError
from hybridflow.observability.machine import MACHINE_FILE
from hybridflow.observability.report.files import Lines
from hybridflow.observability.trackers.jsonl import METRICS_FILE, read_metrics
from hybridflow.planner.costs import Lengths, StepRows
from hybridflow.trainer.ppo.run_plan import Forecaster, forecaster, plan_of
from hybridflow.trainer.replay.kept_rows import config_of

TIMING = "timing_s/"


def _lines(file: Path, steps: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the objects of a run's file that are about these steps."""
    lines = Lines(file)
    lines.poll(1)
    yield from ((step, line) for step, line in lines.by_step.items() if step in steps)


def _lengths(line: Mapping[str, Any]) -> list[float]:
    """Return the tokens of the responses of a line; none where it has something else in their place."""
    tokens = line.get("num_tokens")
    if not isinstance(tokens, list) or not all(isinstance(each, int | float) for each in tokens):
        return []
    return [max(float(each), 1.0) for each in tokens]


def _trajectories(spans: Any) -> dict[str, dict[str, float]]:
    """Return the seconds of each trajectory of a step by cause of the wait."""
    lanes: dict[str, dict[str, float]] = {}
    for span in spans if isinstance(spans, list) else []:
        with suppress(TypeError, ValueError, AttributeError):  # a line of another program
            lane, name, begins, ends = span
            if lane.startswith("trajectory "):
                found = lanes.setdefault(lane, {})
                found[name] = found.get(name, 0.0) + ends - begins
    return lanes


def _card(file: Path) -> str:
    """Return the name of the accelerators in the facts of a run's machine; empty where it has none."""
    with suppress(OSError, ValueError, AttributeError):
        return str(json.loads(file.read_text(encoding="utf-8")).get("card", ""))
    return ""


@dataclass(frozen=True)
class RunTimes:
    """The times and counts of a run, as its folder has them."""

    config: PPOConfig
    steps: Sequence[Mapping[str, float]]
    """Metrics of the steps that count: those after the first, which also builds caches and kernels."""
    lengths: Sequence[Sequence[float]]
    """Tokens of each response of some of these steps."""
    trajectories: Sequence[Mapping[str, float]]
    """Seconds of each recorded trajectory by what it waited for: generate, tool, environment, …"""
    card: str = ""
    """Name of the run's accelerators; empty for a run on a CPU, or before its folder named them."""

    @classmethod
    def read(cls, run: Path) -> RunTimes:
        """Read a run folder. ConfigError for a folder that is none; DataError for one without a whole step
        after the first.
        """
        return cls.of(config_of(run, trains=False), run)

    @classmethod
    def of(cls, config: PPOConfig, run: Path) -> RunTimes:
        """Read the folder of a run with this configuration. DataError as `read` raises it."""
        metrics = read_metrics(run / METRICS_FILE)
        numbers = [step for step in sorted(metrics) if isinstance(metrics[step].get(f"{TIMING}step"), float)]
        if len(numbers) < 2:
            raise DataError(f"{run} has {len(numbers)} finished steps, and the times of two are needed")
        counted = numbers[1:]
        steps = [
            {name: value for name, value in metrics[step].items() if isinstance(value, int | float)}
            for step in counted
        ]
        lengths = [found for _, line in _lines(run / "rollouts.jsonl", counted) if (found := _lengths(line))]
        waits = [
            lane
            for _, line in _lines(run / "timeline.jsonl", counted)
            for lane in _trajectories(line.get("spans")).values()
        ]
        return cls(config, steps, lengths, waits, _card(run / MACHINE_FILE))

    @property
    def seconds(self) -> float:
        """Seconds of a mean step."""
        return self.mean(f"{TIMING}step")

    def mean(self, name: str) -> float:
        """Return the mean of a metric over all steps; a step without it counts as 0."""
        return sum(step.get(name, 0.0) for step in self.steps) / len(self.steps)

    def of_phase(self, phase: str) -> float:
        """Return the seconds of a phase in a mean step."""
        return self.mean(f"{TIMING}{phase}")

    def usual(self, name: str) -> float:
        """Return the median of a metric over the steps that have it; 0 where none has."""
        found = [step[name] for step in self.steps if name in step]
        return median(found) if found else 0.0

    @property
    def replicas(self) -> int:
        """Engines that share a step's requests."""
        plan = plan_of(self.config)
        return max(1, plan.generating // plan.ranks_of_replica)

    @cached_property
    def rows(self) -> StepRows:
        """The rows of a usual step."""
        count = max(self.usual("training/num_trajectories"), 1.0)
        lengths = Lengths(
            max(self.usual("response_length/mean"), 1.0), max(self.usual("response_length/max"), 1.0)
        )
        if self.lengths:
            lengths = Lengths.of(self.lengths[-1])
        group = max(1, self.config.actor_rollout_ref.rollout.n)
        return StepRows(count, self.usual("prompt_length/mean"), lengths, group)

    @cached_property
    def predict(self) -> Forecaster | None:
        return forecaster(self.config, self.card)

    @cached_property
    def by_model(self) -> float:
        """Seconds of generation in a mean step that the model needs, without waits for tools.

        Where these are slow, an engine has its rows one after the other, and takes more steps than the
        longest response has tokens; what it needs is the time of as many steps as that.
        """
        whole = self.of_phase("gen")
        names = {name for lane in self.trajectories for name in lane}
        rate = self.usual("perf/rollout_tokens_per_second")
        steps = self.usual("rollout/decode_steps") / self.replicas
        if not rate or not steps or names <= {"generate", "reward"}:
            return whole
        needed = min(1.0, self.rows.lengths.quantile(1) / steps)
        return min(whole, needed * self.usual("rollout/generated_tokens") / rate)

    def saving(self, phase: str, changes: Mapping[str, Any]) -> float | None:
        """Return the seconds that a phase would save with these keys, by the planner's model; None where that
        does not know the model or the device.
        """
        predict = self.predict
        if predict is None:
            return None
        now = predict(self.config, self.rows).get(phase)
        then = predict(with_values(self.config, dict(changes)), self.rows).get(phase)
        if now is None or then is None or not now.of_tokens:
            return None
        seconds = self.by_model if phase == "gen" else self.of_phase(phase)
        # what a pass takes besides its tokens is a figure of the machine; the rest of the time is theirs
        passes = min(now.of_passes, seconds)
        fewer = then.of_passes / now.of_passes if now.of_passes else 1.0
        tokens = (seconds - passes) * then.of_tokens / now.of_tokens
        return max(0.0, seconds - tokens - passes * fewer)
