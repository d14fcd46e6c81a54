"""The run on the terminal: a line a step, a table at validation, and a progress bar where somebody is
watching.

On a pipe or in CI there is no bar and no colour. Lines are then at least two seconds apart, so that fast
steps do not fill a log file; the first step, the last one and those with a validation always have theirs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from hybridflow.observability.logging_setup import console as shared_console
from hybridflow.observability.trackers.base import RunInfo, SampleRow, Tracker


class _Field(NamedTuple):
    label: str
    names: tuple[str, ...]  # the first that is there is shown
    form: Callable[[float], str]


def _quantity(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 8.4s, 3m 05s, 2h 07m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


_FIELDS = (
    _Field("loss", ("train/loss",), "{:.4f}".format),
    _Field("reward", ("critic/rewards/mean", "critic/score/mean"), "{:+.3f}".format),
    _Field("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:.4f}".format),
    _Field("ppo_kl", ("actor/ppo_kl",), "{:.4f}".format),
    _Field("entropy", ("actor/entropy",), "{:.3f}".format),
    _Field("length", ("response_length/mean",), "{:.1f}".format),
    _Field("tok/s", ("perf/throughput", "train/tokens_per_second"), _quantity),
    _Field("time", ("timing_s/step", "perf/time_per_step"), duration),
)
_VALIDATION = re.compile(r"^val[^/]*/")
_VARIANT = re.compile(r"^(?:(?P<source>.+)/)?(?P<key>[^/]+)/(?P<variant>(?:mean|best|maj|worst|std)@.*)$")
_QUIET_SECONDS = 2.0  # between two lines where nobody is watching
_SAMPLE_WIDTH = 300  # characters of a prompt or response in the sample table


class ConsoleTracker(Tracker):
    """Writes to the shared console; `console` and `clock` are for other terminals and for tests."""

    def __init__(
        self, run: RunInfo, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or shared_console
        self._total, self._start, self._clock = run.total_steps, run.resume_step or 0, clock
        self._last_time, self._step_seconds = clock(), 0.0
        self._last_line = -math.inf  # when the last line was printed
        self._validations: dict[str, list[float]] = {}
        self._progress: Progress | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        validation = {name: value for name, value in metrics.items() if _VALIDATION.match(name)}
        if any(name in metrics for field in _FIELDS for name in field.names):
            left = self._time_left(metrics, step)
            if self._console.is_terminal or self._is_due(step, bool(validation)):
                self._show_step(metrics, step, left)
        if validation:
            self._show_validation(validation, step)

    def _is_due(self, step: int, validated: bool) -> bool:
        due = validated or step == self._total or self._last_time - self._last_line >= _QUIET_SECONDS
        if due:
            self._last_line = self._last_time
        return due

    def _show_step(self, metrics: Mapping[str, float], step: int, left: float | None) -> None:
        line = Text()
        total = f"/{self._total}" if self._total else ""
        line.append(f"step {step:>{len(str(self._total or 0))}}{total}", style="bold")
        for label, names, form in _FIELDS:
            value = next((metrics[name] for name in names if name in metrics), None)
            if value is not None:
                line.append(" · ", style="dim").append(label + " ", style="dim").append(
                    form(value), style="red" if value != value else ""
                )
        if left is not None:
            line.append(" · ", style="dim").append("left ", style="dim").append(duration(left))
        if self._console.is_terminal:
            self._advance(step, metrics.get("perf/throughput"), left)
        self._console.print(line, soft_wrap=True)

    def _time_left(self, metrics: Mapping[str, float], step: int) -> float | None:
        """Steps left times the recent seconds a step (validation and saving included, as the clock sees
        them).
        """
        now = self._clock()
        seconds, self._last_time = now - self._last_time, now
        # before the first line stands the start of the run: take the step's own time
        if not self._step_seconds:
            seconds = metrics.get("timing_s/step", seconds)
        self._step_seconds = seconds if not self._step_seconds else 0.9 * self._step_seconds + 0.1 * seconds
        return max(self._total - step, 0) * self._step_seconds if self._total else None

    def _advance(self, step: int, throughput: float | None, left: float | None) -> None:
        if self._progress is None:
            columns = (
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}{task.fields[left]}"),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("training", total=self._total, completed=self._start, speed="", left="")
            self._progress.start()
        speed = f"{_quantity(throughput)} tok/s" if throughput is not None else ""
        self._progress.update(
            self._progress.task_ids[0],
            completed=step,
            speed=speed,
            left=f" · {duration(left)} left" if left is not None else "",
        )

    def _show_validation(self, metrics: Mapping[str, float], step: int) -> None:
        table = Table(
            title=f"validation at step {step}",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for name in ("source", "score", "samples"):
            table.add_column(name, overflow="fold")
        for name in ("value", "change", "in all"):
            table.add_column(name, justify="right")
        for name, value in metrics.items():
            rest = _VALIDATION.sub("", name)
            match = _VARIANT.match(rest)
            source, key, variant = (
                (match["source"] or "", match["key"], match["variant"]) if match else ("", rest, "")
            )
            seen = self._validations.setdefault(name, [])
            changes = [f"{value - seen[-1]:+.4f}", f"{value - seen[0]:+.4f}"] if seen else ["", ""]
            table.add_row(Text(source), Text(key), Text(variant), f"{value:.4f}", *changes)
            seen.append(value)
        self._console.print(table)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if not rows:
            return
        table = Table(
            title=f"samples at step {step}",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_lines=True,
        )
        for name in ("prompt", "response", "answer"):
            table.add_column(name, overflow="fold")
        table.add_column("score", justify="right")
        for row in rows:
            score = row.get("score")
            texts = [_cut(row.get(name)) for name in ("prompt", "response", "ground_truth")]
            table.add_row(*texts, f"{score:.2f}" if isinstance(score, (int, float)) else _cut(score))
        self._console.print(table)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _cut(value: object) -> Text:
    text = "" if value is None else str(value)
    return Text(text if len(text) <= _SAMPLE_WIDTH else text[:_SAMPLE_WIDTH] + f"… ({len(text)} characters)")
