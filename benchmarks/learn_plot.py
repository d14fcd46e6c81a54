"""Training curves: mean and spread over seeds of the training score, by tokens generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLUMNS = 6
LINE = "#2563a8"
BAND = "#2563a833"
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "hybridflow",
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
    }
)


def plot_all(path: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Plot a small figure for each recipe, on the same axes; `curves`: name → the `curves` of each seed."""
    lines = -(-len(curves) // COLUMNS)
    figure, axes = plt.subplots(
        lines,
        COLUMNS,
        figsize=(2.1 * COLUMNS, 1.6 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, found) in zip(axes.flat, sorted(curves.items()), strict=False):
        _draw(axis, found)
        axis.set_title(name, fontsize=8)
    for axis in list(axes.flat)[len(curves) :]:
        axis.set_visible(False)
    figure.supxlabel("tokens generated, thousands", fontsize=9)
    figure.supylabel("training score", fontsize=9)
    save(figure, path)


def plot_one(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """One recipe, larger."""
    figure, axis = plt.subplots(figsize=(5.0, 2.6), layout="constrained")
    _draw(axis, found)
    axis.set_xlabel("tokens generated, thousands")
    axis.set_ylabel("training score")
    save(figure, path)


def _draw(axis: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    """Mean over seeds by step, a band from the lowest to the highest seed; as far as all seeds go."""
    steps = min(len(curve["score"]) for curve in found)
    tokens = [sum(curve["tokens"][step] for curve in found) / len(found) / 1000 for step in range(steps)]
    scores = [[curve["score"][step] for curve in found] for step in range(steps)]
    axis.fill_between(tokens, [min(s) for s in scores], [max(s) for s in scores], color=BAND, linewidth=0)
    axis.plot(tokens, [sum(s) / len(s) for s in scores], color=LINE, linewidth=1.2)
    axis.set_ylim(0, 1)
    axis.grid(color="#dddddd", linewidth=0.4)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
