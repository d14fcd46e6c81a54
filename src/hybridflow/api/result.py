"""A run by its folder: metrics, samples, report and model, whether a program or the command has made it."""

from __future__ import annotations

import difflib
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.api.build import load_trained
from hybridflow.errors import CheckpointError, DataError
from hybridflow.observability.report import write_report
from hybridflow.observability.report.files import read_yaml
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.stopping import newest_checkpoint

FRAME = '<iframe srcdoc="{}" style="width: 100%; height: {}px; border: 0"></iframe>'
SHOWN = ("train/loss", "critic/score/mean", "response_length/mean", "perf/throughput")
"""Metrics of a training step in the short table of a run."""


@dataclass(frozen=True)
class Report(os.PathLike[str]):
    """A report's file, which a notebook shows."""

    path: Path
    height: int = 700
    """Pixels in a notebook."""

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        return FRAME.format(html.escape(self.path.read_text(encoding="utf-8"), quote=True), self.height)


class Run:
    """A run by its folder; everything is read when it is asked for, also while the run goes on."""

    def __init__(
        self, folder: str | os.PathLike[str], *, message: str = "", notes: Sequence[str] = ()
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.message = message
        """Why the run ended before its last step, and how to go on; empty otherwise."""
        self.notes = list(notes)
        """The notes on the configuration, as the command prints them."""

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Open the folder of a run, which the command may have made. Raises DataError if it holds none."""
        run = cls(folder)
        if not (run.folder / "config.yaml").is_file():
            raise DataError(f"{run.folder} holds no config.yaml: give the run folder of a run")
        return run

    @property
    def config(self) -> dict[str, Any]:
        """All keys that the run had, nested."""
        return read_yaml(self.folder / "config.yaml")

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics by step, each a dict with `step`, as a table: pandas.DataFrame(run.metrics)."""
        lines = read_metrics(self.folder / "metrics.jsonl")
        return [{"step": step, **lines[step]} for step in sorted(lines)]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric, and its values there.

        Raises DataError where no step has it.
        """
        lines = self.metrics
        steps = [int(line["step"]) for line in lines if name in line]
        if not steps:
            names = sorted({key for line in lines for key in line})
            near = difflib.get_close_matches(name, names, n=5, cutoff=0.3)
            raise DataError(
                f"no step of {self.folder} has the metric {name!r}; near it are {', '.join(near) or 'none'}"
            )
        return steps, [line[name] for line in lines if name in line]

    @property
    def validation(self) -> dict[str, float]:
        """The metrics of the last validation; empty without one."""
        for line in reversed(self.metrics):
            found = {name: value for name, value in line.items() if name.startswith("val")}
            if found:
                return found
        return {}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Some prompts, responses and scores of training steps, in the order of steps."""
        return _rows(self.folder / "samples")

    @property
    def validation_samples(self) -> list[dict[str, Any]]:
        """Some prompts, responses and scores of validations, in the order of steps."""
        return _rows(self.folder / "validation")

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that was saved last, or None."""
        return newest_checkpoint(self.folder)

    def report(self) -> Report:
        """Write the run's report, one HTML file with its curves and samples; a notebook shows it."""
        return Report(write_report(self.folder))

    def model(self) -> tuple[Any, Any]:
        """Load the trained model and its tokenizer from the newest checkpoint, as transformers has them.

        Adapters are folded into their base. `hybridflow merge` writes a folder in place of it. Raises
        CheckpointError without a checkpoint.
        """
        newest = self.checkpoint
        if newest is None:
            raise CheckpointError(
                f"{self.folder} has no checkpoint, so the trained weights were not kept: set "
                "trainer.save_freq (hybridflow.train saves at the end unless the keys say otherwise)"
            )
        return load_trained(newest)

    def __repr__(self) -> str:
        steps = [line["step"] for line in self.metrics]
        words = [f"{max(steps, default=0)} steps", self.message]
        return f"Run({str(self.folder)!r}: {'; '.join(filter(None, words))})"

    def _repr_html_(self) -> str:
        """Return a short table: the newest metrics and the last validation."""
        newest: dict[str, float] = {}
        for line in self.metrics:
            newest |= line
        shown = {name: newest[name] for name in SHOWN if name in newest} | self.validation
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>" for name, value in shown.items()
        )
        return f"<p><code>{html.escape(repr(self))}</code></p><table>{rows}</table>"


def _rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted((int(file.stem), file) for file in folder.glob("*.jsonl") if file.stem.isdigit())
    texts = [text for _, file in files for text in file.read_text(encoding="utf-8").split("\n")]
    return [json.loads(text) for text in texts if text.strip()]
