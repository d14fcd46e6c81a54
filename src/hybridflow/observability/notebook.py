"""The display of a run in a notebook: a bar, what is being done, and a table of the newest steps.

    Progress, metrics ──NotebookView──► one HTML output of the cell, renewed each second

It is plain HTML, so it needs no widgets, and its last state stays in the notebook.
"""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hybridflow.observability.progress import Progress, duration, progress
from hybridflow.observability.trackers.base import Tracker
from hybridflow.observability.trackers.console import FIELDS, VALIDATION

SECONDS = 1.0
"""Time between two renewals."""
MAX_ROWS = 8
"""Steps in the table."""


class NotebookView(Tracker):
    """The output of one cell, shown from `start` to `stop` and kept after that."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._steps: dict[int, Mapping[str, float]] = {}
        self._validations: dict[int, Mapping[str, float]] = {}
        self._done: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="notebook", daemon=True)

    def start(self) -> None:
        """Show the output."""
        shown: Any = import_module("IPython.display")
        self._html = shown.HTML
        self._output = shown.display(shown.HTML(self.render()), display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Show the last state, which stays."""
        self._ended.set()
        self._thread.join()
        self._output.update(self._html(self.render()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the rows of the tables."""
        if any(field.value(metrics) is not None for field in FIELDS):
            self._steps = dict(list({**self._steps, step: metrics}.items())[-MAX_ROWS:])
            self._done = step
        validation = {name: value for name, value in metrics.items() if VALIDATION.match(name)}
        if validation:
            self._validations = {**self._validations, step: validation}

    def _renew(self) -> None:
        while not self._ended.wait(SECONDS):
            self._output.update(self._html(self.render()))

    def render(self) -> str:
        """Return the HTML of the present state."""
        parts = [f"<p>{self._bar()} {html.escape(self._words())}</p>"]
        if self._steps:
            there = self._steps.values()
            fields = [field for field in FIELDS if any(field.value(each) is not None for each in there)]
            rows = []
            for step, metrics in self._steps.items():
                values = [(field, field.value(metrics)) for field in fields]
                cells = ["" if value is None else field.form(value) for field, value in values]
                rows.append([str(step), *cells])
            parts.append(_table(["step", *(field.label for field in fields)], rows))
        if self._validations:
            steps = list(self._validations)
            first = steps[0]
            last = steps[-1]
            rows = [
                [name, f"{self._validations[first].get(name, float('nan')):.4f}", f"{value:.4f}"]
                for name, value in self._validations[last].items()
            ]
            parts.append(_table(["validation", f"step {first}", f"step {last}"], rows))
        return "".join(parts)

    def _bar(self) -> str:
        total = self._progress.total_steps
        if self._done is None or not total:
            return ""
        return f'<progress value="{self._done}" max="{total}"></progress>'

    def _words(self) -> str:
        if self._ended.is_set():
            return f"{self._done or 0} of {self._progress.total_steps} steps"
        text = self._progress.describe() or "working"
        if self._progress.seconds_left:
            text += f" · {duration(self._progress.seconds_left)} left"
        return text


def _table(names: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


@contextmanager
def displayed(wanted: bool) -> Iterator[list[Tracker]]:
    """Show a run as the place allows: on a terminal as the command does, in a notebook as a separate view.

    Gives the trackers that the view needs. Where it is not `wanted`, nothing is printed.
    """
    console = progress.console
    if wanted and not _in_notebook():
        yield []
        return
    quiet = console.quiet
    console.quiet = True  # lines of a terminal would be beside the view
    try:
        if not wanted:
            yield []
            return
        view = NotebookView(progress)
        with progress.shown(view):
            yield [view]
    finally:
        console.quiet = quiet


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, and not IPython on a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
