"""The agents page: results of cells in; bars, a table, curves and the text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from agents_settings import CONTROL, TASKS, WELL_FORMED
from side_by_side import line

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""Finished cells of each task, a seed each."""
AGENT = "val-aux/agent"
MOST_SECONDS = 480
"""CPU seconds that a seed may take, warm-up and run together."""


@dataclass(frozen=True)
class Measure:
    """A number of held-out trajectories that must change."""

    task: str
    title: str
    names: tuple[str, ...]
    """Metrics: the first one, less the others."""
    gain: float
    """Least change from before to after, on average over the seeds; below 0 it must fall."""

    def of(self, line: Mapping[str, float]) -> float:
        """Return its value in the metrics of one validation."""
        first, *others = (line.get(name, 0.0) for name in self.names)
        return first - sum(others)


CALLS = tuple(f"{AGENT}/tools/{name}" for name in ("tool_calls", "unknown", "raised", "too_many"))
ACCURACY = Measure("calculator", "calculator: accuracy", ("val-core/calculator/reward/mean@1",), 0.4)
WELL_FORMED_CALLS = Measure("calculator", "calculator: share of well-formed calls", CALLS, 0.4)
MEASURES = (
    ACCURACY,
    WELL_FORMED_CALLS,
    Measure("guess", "guess: mean number of guesses", (f"{AGENT}/environment/num_guesses",), -0.8),
    Measure("search", "search: accuracy", ("val-core/search/reward/mean@1",), 0.3),
)
MOST_BEFORE = 0.3
"""Well-formed calls before the run, at most."""
CONTROL_GAIN = 0.03
"""Most that the control's accuracy may rise, measured with the right calculator."""


def validations(cell: Mapping[str, Any], measure: Measure) -> list[tuple[int, float]]:
    """Return (step, value) of each validation of a run."""
    return [(each["step"], measure.of(each)) for each in cell["curve"] if measure.names[0] in each]


def problems_of(found: Found, seeds: Sequence[int]) -> list[str]:
    """Return the bars that were missed, and cells that are missing, as sentences."""
    told = [
        f"{name}: {len(found[name])} of {len(seeds)} seeds are there"
        for name in TASKS
        if len(found[name]) < len(seeds)
    ]
    for measure in MEASURES:
        if not found[measure.task]:
            continue
        before, after = _before_after(found[measure.task], measure)
        gain = mean(after) - mean(before)
        sign = 1 if measure.gain > 0 else -1
        if sign * gain < sign * measure.gain:
            told.append(f"{measure.title} changed by {gain:+.2f}, wanted {measure.gain:+.2f}")
        if measure is WELL_FORMED_CALLS and max(before) > MOST_BEFORE:
            told.append(f"{measure.title}: {max(before):.2f} before the run, wanted {MOST_BEFORE} at most")
    for cell in found[CONTROL]:
        gain = ACCURACY.of(cell["after"]) - ACCURACY.of(cell["warm_up"]["curve"][0])
        if gain > CONTROL_GAIN:
            told.append(f"{CONTROL}, seed {cell['seed']}: accuracy changed by {gain:+.2f}")
    slow = [cell for cells in found.values() for cell in cells if _cpu(cell) > MOST_SECONDS]
    return told + [f"{cell['name']}, seed {cell['seed']}: {_cpu(cell):.0f} CPU seconds" for cell in slow]


TEXT = """\
# Agents learn

{facts}

Written by benchmarks/agents.py; do not edit. Models of 0.4 M parameters. A warm-up by supervised fine-tuning
shows them conversations of which {well_formed:.0%} are right in form; GRPO does the rest (`recipes/tiny/`).
All numbers are of 512 held-out trajectories, sampled at temperature 1.

- `calculator`: 37 \\* 84 + 52 \\* 19 is too much for such a model's head, and there is a tool to call. A call
  counts as well-formed where it is the first turn and the tool can answer it.
- The control is the same, but the tool answers by chance. Its accuracy is measured with a calculator that is
  right.
- `guess`: a number from 1 to 7, with at most 4 guesses. In the warm-up most games are played without a
  number, and the others heed the hints without a plan; a game that is lost counts as 4 guesses.
- `search`: facts about people, made up for each question, have to be looked up.
- More warm-up alone: the same supervised fine-tuning goes on, for as many conversations as the run has
  trajectories.

{table}

![held-out curves by conversations since the warm-up](agents.svg)

{verdict}
"""


def page(found: Found, facts: str, problems: Sequence[str]) -> str:
    """Return the text of results/agents.md."""
    head = ("task", "", "before", "after, and by seed", "more warm-up alone", "CPU seconds of a seed")
    rows = [_row(measure, found[measure.task]) for measure in MEASURES if found[measure.task]]
    if found[CONTROL]:
        rows.append(_control_row(found[CONTROL]))
    verdict = "All bars are met."
    if problems:
        verdict = "Not as wanted:\n\n" + "\n".join(f"- {each}" for each in problems)
    table = "\n".join([line(head), line(["---"] * len(head)), *(line(row) for row in rows)])
    return TEXT.format(facts=facts, well_formed=WELL_FORMED, table=table, verdict=verdict)


def draw(path: Path, found: Found) -> None:
    """Plot each measure by conversations since the warm-up: mean and range over the seeds."""
    from learn_plot import plt, save

    figure, axes = plt.subplots(2, 2, figsize=(8.0, 5.0), layout="constrained")
    for axis, measure in zip(axes.flat, MEASURES, strict=True):
        _plot(axis, [_points(cell, measure) for cell in found[measure.task]], "#2563a8", "GRPO")
        beside = [_warm_points(cell, measure) for cell in found[measure.task]]
        _plot(axis, beside, "#999999", "more warm-up alone")
        if measure.task == "calculator":
            control = [_points(cell, measure) for cell in found[CONTROL]]
            _plot(axis, control, "#c2410c", "GRPO, the calculator answers by chance")
        axis.set_title(measure.title, fontsize=9)
        axis.grid(color="#dddddd", linewidth=0.4)
        if axis.lines:
            axis.legend(fontsize=7, frameon=False)
    figure.supxlabel("conversations since the warm-up", fontsize=9)
    save(figure, path)


def _plot(axis: Any, curves: Sequence[Sequence[tuple[float, float]]], color: str, label: str) -> None:
    if not curves:
        return
    places = [place for place, _ in curves[0]]
    values = [[value for _, value in points] for points in zip(*curves, strict=True)]
    low = [min(each) for each in values]
    high = [max(each) for each in values]
    axis.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    axis.plot(places, [mean(each) for each in values], color=color, linewidth=1.2, label=label)


def _warm_points(cell: Mapping[str, Any], measure: Measure) -> list[tuple[float, float]]:
    """Return (conversations since the warm-up, value) of the further warm-up; 64 conversations a step."""
    steps = cell["warm_up"]["steps"]
    curve = cell["warm_up"]["curve"]
    return [(64.0 * (step - steps[0]), measure.of(each)) for step, each in zip(steps, curve, strict=True)]


def _points(cell: Mapping[str, Any], measure: Measure) -> list[tuple[float, float]]:
    """Return (trajectories, value) of the validations of a run, which are as many as those of the warm-up."""
    places = [place for place, _ in _warm_points(cell, measure)]
    return list(zip(places, (value for _, value in validations(cell, measure)), strict=True))


def _before_after(cells: Sequence[Mapping[str, Any]], measure: Measure) -> tuple[list[float], list[float]]:
    curves = [validations(cell, measure) for cell in cells]
    return [curve[0][1] for curve in curves], [curve[-1][1] for curve in curves]


def _row(measure: Measure, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    task, _, what = measure.title.partition(": ")
    alone = mean(measure.of(cell["warm_up"]["curve"][-1]) for cell in cells)
    return [task, what, *_values(*_before_after(cells, measure)), f"{alone:.2f}", _seconds(cells)]


def _control_row(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    before = [ACCURACY.of(cell["warm_up"]["curve"][0]) for cell in cells]
    after = [ACCURACY.of(cell["after"]) for cell in cells]
    return ["control: answers by chance", "accuracy", *_values(before, after), "", _seconds(cells)]


def _values(before: Sequence[float], after: Sequence[float]) -> list[str]:
    by_seed = ", ".join(f"{value:.2f}" for value in after)
    return [f"{mean(before):.2f}", f"**{mean(after):.2f}** ({by_seed})"]


def _cpu(cell: Mapping[str, Any]) -> float:
    return float(cell["warm_up"]["cpu"] + cell["cpu"])


def _seconds(cells: Sequence[Mapping[str, Any]]) -> str:
    warm_up = mean(float(cell["warm_up"]["cpu"]) for cell in cells)
    return f"{warm_up:.0f} warm-up + {mean(float(cell['cpu']) for cell in cells):.0f} GRPO"
