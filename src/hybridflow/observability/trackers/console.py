"""The run on the terminal: a line a step and a table at validation.

On a pipe or in CI there is no colour. Lines are then at least two seconds apart, so that fast steps do not
fill a log file; the first step, the last one and those with a validation always have theirs. What happens
inside a step is shown by `observability.progress`, on the same console.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.observability.glossary import find
from hybridflow.observability.progress import Progress, duration
from hybridflow.observability.progress import progress as shared_progress
from hybridflow.observability.trackers.base import Outcome, RunInfo, SampleRow, Tracker


class ShownField(NamedTuple):
    label: str
    names: tuple[str, ...]
    """Metrics, of which the first that the step has is shown."""
    form: Callable[[float], str]
    keep: int
    """Where the terminal is too narrow for the whole line, the fields with the lowest number go first."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the displayed value of a step."""
        return next((metrics[name] for name in self.names if name in metrics), None)


def _quantity(value: float) -> str:
    for size, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / divisor:.1f}{unit}"
    return f"{value:.0f}"


FIELDS = (
    ShownField("loss", ("train/loss",), "{:.4f}".format, 9),
    ShownField("accuracy", ("train/accuracy",), "{:.3f}".format, 8),
    ShownField("reward", ("critic/rewards/mean", "critic/score/mean"), "{:+.3f}".format, 9),
    ShownField("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:.4f}".format, 2),
    ShownField("ppo_kl", ("actor/ppo_kl",), "{:.4f}".format, 1),
    ShownField("entropy", ("actor/entropy",), "{:.3f}".format, 4),
    ShownField("length", ("response_length/mean",), "{:.1f}".format, 5),
    ShownField("tok/s", ("perf/throughput",), _quantity, 3),
    ShownField("time", ("timing_s/step", "perf/time_per_step"), duration, 6),
)
_LEFT = ShownField("left", (), duration, 7)
VALIDATION = re.compile(r"^val[^/]*/")
_VARIANT = re.compile(r"^(?:(?P<source>.+)/)?(?P<key>[^/]+)/(?P<variant>(?:mean|best|maj|worst|std)@.*)$")
_QUIET_SECONDS = 2.0  # between two lines where no terminal is attached
_SAMPLE_WIDTH = 300  # characters of a prompt or response in the sample table


class ConsoleTracker(Tracker):
    """Writes to the shared console; `console` and `clock` are for other terminals and for tests."""

    def __init__(
        self, run: RunInfo, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = shared_progress if console is None else Progress(console)
        self._console = self._progress.console
        self._total = run.total_steps
        self._clock = clock
        self._last_time = clock()
        self._step_seconds = 0.0
        self._last_line = -math.inf  # when the last line was printed
        self._validations: dict[str, list[float]] = {}
        self._shown = ExitStack()
        if self._console.is_terminal:  # for a trainer that is used without the command
            self._shown.enter_context(self._progress.shown())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        validation = {name: value for name, value in metrics.items() if VALIDATION.match(name)}
        if any(field.value(metrics) is not None for field in FIELDS):
            left = self._time_left(metrics, step)
            self._progress.seconds_left = left
            if self._console.is_terminal or self._is_due(step, bool(validation)):
                self._print(self._step_line(metrics, step, left), soft_wrap=True)
        if validation:
            self._show_validation(validation, step)

    def _print(self, what: Text | Table, **options: bool) -> None:
        self._progress.heard()
        self._console.print(what, **options)  # type: ignore[arg-type]  # its options have many types

    def _is_due(self, step: int, validated: bool) -> bool:
        due = validated or step == self._total or self._last_time - self._last_line >= _QUIET_SECONDS
        if due:
            self._last_line = self._last_time
        return due

    def _step_line(self, metrics: Mapping[str, float], step: int, left: float | None) -> Text:
        """Return the line of a step, on a terminal without the fields for which it has no room."""
        fields = [(field, value) for field in FIELDS if (value := field.value(metrics)) is not None]
        if left is not None:
            fields.append((_LEFT, left))
        line = self._joined(fields, step)
        while self._console.is_terminal and fields and line.cell_len > self._console.width:
            fields.remove(min(fields, key=lambda each: each[0].keep))
            line = self._joined(fields, step)
        return line

    def _joined(self, fields: Sequence[tuple[ShownField, float]], step: int) -> Text:
        line = Text()
        total = f"/{self._total}" if self._total else ""
        line.append(f"step {step:>{len(str(self._total or 0))}}{total}", style="bold")
        for field, value in fields:
            line.append(" · ", style="dim").append(field.label + " ", style="dim")
            line.append(field.form(value), style="red" if math.isnan(value) else "")
        return line

    def _time_left(self, metrics: Mapping[str, float], step: int) -> float | None:
        """Return the seconds of the steps left, by the recent ones; None after the last."""
        now = self._clock()
        seconds = now - self._last_time
        self._last_time = now
        if not self._step_seconds:
            # before the first line stands the start of the run: take the step's own time
            self._step_seconds = metrics.get("timing_s/step", seconds)
        else:
            self._step_seconds = 0.9 * self._step_seconds + 0.1 * seconds
        if not self._total or step >= self._total:
            return None
        return (self._total - step) * self._step_seconds

    def _show_validation(self, metrics: Mapping[str, float], step: int) -> None:
        table = _table(f"validation at step {step}", pad_edge=False)
        for name in ("source", "score", "samples"):
            table.add_column(name, overflow="fold")
        for name in ("value", "change", "in all"):
            table.add_column(name, justify="right")
        for name, value in metrics.items():
            rest = VALIDATION.sub("", name)
            words = ("", rest, "")
            if match := _VARIANT.match(rest):
                words = (match["source"] or "", match["key"], match["variant"])
            seen = self._validations.setdefault(name, [])
            changes = [_change(name, value - before) for before in (*seen[-1:], *seen[:1])]
            table.add_row(*map(Text, words), f"{value:.4f}", *changes)
            seen.append(value)
        self._print(table)

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        if not rows:
            return
        table = _table(f"samples at step {step}", show_lines=True)
        for name in ("prompt", "response", "answer"):
            table.add_column(name, overflow="fold")
        table.add_column("score", justify="right")
        for row in rows:
            score = row.get("score")
            texts = [_cut(row.get(name)) for name in ("prompt", "response", "ground_truth")]
            table.add_row(*texts, f"{score:.2f}" if isinstance(score, (int, float)) else _cut(score))
        self._print(table)

    def close(self, outcome: Outcome = "finished") -> None:
        self._progress.seconds_left = None
        self._shown.close()


def _table(title: str, **options: bool) -> Table:
    head = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    return Table(title=title, **head, **options)  # type: ignore[arg-type]  # its options have many types


def _change(name: str, difference: float) -> Text:
    """Return how far a metric has moved, green where that is better and red where it is worse."""
    entry = find(name)
    style = ""
    if entry is not None and entry.better and difference:
        style = "green" if (difference > 0) == (entry.better == "higher") else "red"
    return Text(f"{difference:+.4f}", style=style)


def _cut(value: object) -> Text:
    text = "" if value is None else str(value)
    if len(text) > _SAMPLE_WIDTH:
        text = f"{text[:_SAMPLE_WIDTH]}… ({len(text)} characters)"
    return Text(text)
