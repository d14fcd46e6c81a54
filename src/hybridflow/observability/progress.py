"""The display of what a run is doing right now.

    Timer sections, counted loops ──phase/each──► Progress ──shown──► a status line that moves   (terminal)
                                                               └────► a line after each silence  (pipe, CI)

There is one `progress` a process, as there is one console. Reporting to it costs next to nothing where the
display is not switched on, as in worker processes, in tests and in a library's use.
"""

from __future__ import annotations

import logging
import os
import pdb
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hybridflow.observability.importing import importing
from hybridflow.observability.logging_setup import console as shared_console

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFRESHES_PER_SECOND = 4
EARLY_SECONDS = 300.0
"""Seconds from the start in which a person is likely to be watching a pipe."""
EARLY_SILENCE = 10.0
"""Longest silence on a pipe in that time, in seconds; afterwards it is `LATE_SILENCE`."""
LATE_SILENCE = 60.0
BAR_WIDTH = 20
WIDE_ENOUGH_FOR_BAR = 100
"""Columns of a terminal from which the status line has room for a bar."""


@dataclass(eq=False)
class Phase:
    """Something that a thread of the run is doing, with a count where it consists of equal parts."""

    words: str
    started: float
    done: int = 0
    total: int | None = None
    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        if self.total is None:
            return self.words
        return f"{self.words} {self.done}/{self.total}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 8.4s, 3m 05s, 2h 07m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


class Display(Protocol):
    """A view of a Progress, from `start` to `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Progress:
    """The phases that are open, the step of the run, and their display."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.step: int | None = None
        """The training step that is running, from 1; None before the first one."""
        self.finished_step: int | None = None
        """The newest step whose work cannot be lost any more by leaving it."""
        self.total_steps: int | None = None
        self.has_trained = False
        """True after the last step, when only the end of the run is left."""
        self.seconds_left: float | None = None
        """Estimated seconds until the end of the run; None while unknown."""
        self.console = console or shared_console
        self.clock = clock
        self.last_output = 0.0
        """When the run last logged something, by the clock; kept while the display is on."""
        self._phases: list[Phase] = []
        self._lock = threading.RLock()
        self._display: Display | None = None

    @contextmanager
    def phase(self, words: str, total: int | None = None) -> Iterator[Phase]:
        """Report that `words` is being done, inside whatever is being done already."""
        phase = Phase(words, self.clock(), total=total)
        with self._lock:
            self._phases.append(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._phases.remove(phase)

    @contextmanager
    def importing(self, libraries: str = "torch and transformers") -> Iterator[None]:
        """Report that libraries are imported which take seconds, and put off garbage collections."""
        with self.phase(f"importing {libraries}"), importing():
            yield

    def each(self, items: Iterable[T], words: str, total: int) -> Iterator[T]:
        """Go through the parts of some work; the count says which of them is being done."""
        with self.phase(words, total) as phase:
            for item in items:
                phase.done += 1
                yield item

    def results(self, items: Iterable[T], total: int | None) -> Iterator[T]:
        """Go through results as they come; their number is the count of the phase that is open, of `total`
        where it is known.
        """
        own = threading.get_ident()
        with self._lock:
            mine = (phase for phase in reversed(self._phases) if phase.thread == own)
            phase = next(mine, Phase("", self.clock()))
        phase.done = 0
        phase.total = total
        for item in items:
            phase.done += 1
            yield item

    @contextmanager
    def steps(self, total: int) -> Iterator[None]:
        """Count training steps inside the context; the loop that runs them sets `step`."""
        self.total_steps = total
        self.finished_step = None
        self.has_trained = False
        try:
            yield
        finally:
            self.step = None
            self.has_trained = True

    def describe(self) -> str:
        """Return in one line what is being done: step, phases from outer to inner, time of the innermost; and
        what other threads do beside it.
        """
        with self._lock:
            phases = list(self._phases)
        by_thread: dict[int, list[Phase]] = {}
        for phase in phases:
            by_thread.setdefault(phase.thread, []).append(phase)
        lines = []
        if self.step is not None:
            lines.append(f"step {self.step}/{self.total_steps}")
        for own in by_thread.values():
            parts = [*map(str, own), duration(self.clock() - own[-1].started)]
            lines.append(" · ".join(parts))
        first, beside = lines[:2], lines[2:]
        if self.step is None:
            first, beside = lines[:1], lines[1:]
        return " | beside it: ".join([" · ".join(first), *beside])

    def place(self) -> str:
        """Return where the run is: "in step 3/8", "after step 3/8" or "while loading the model"."""
        with self._lock:
            if self.step is not None:
                word = "after" if self.step == self.finished_step else "in"
                return f"{word} step {self.step}/{self.total_steps}"
            if self._phases:
                return f"while {self._phases[-1].words}"
        if self.has_trained:
            return "while the run was ending"
        return "before the first step"

    def heard(self) -> None:
        """Note that the run has just logged something, so that no heartbeat line is due."""
        self.last_output = self.clock()

    @contextmanager
    def shown(self, display: Display | None = None) -> Iterator[None]:
        """Show the open phases inside the context, unless they are shown already.

        None: on the console, as a line that moves where it is a terminal.
        """
        if self._display is not None:
            yield
            return
        if display is None:
            kind = _StatusLine if self.console.is_terminal else _Heartbeat
            display = kind(self)
        self.heard()
        self.total_steps = None  # of an earlier run of this process
        self.finished_step = None
        self.has_trained = False
        self.seconds_left = None
        self._display = display
        self._display.start()
        try:
            yield
        finally:
            self._display.stop()
            self._display = None

    def render(self) -> RenderableType:
        """The status line of a terminal."""
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [_SPINNER]
        if self.step is not None and self.total_steps and self.console.width >= WIDE_ENOUGH_FOR_BAR:
            cells.append(ProgressBar(self.total_steps, self.step - 1, width=BAR_WIDTH))
        text = self.describe() or "working"
        if self.seconds_left:
            text += f" · {duration(self.seconds_left)} left"
        cells.append(Text(text, no_wrap=True, overflow="ellipsis"))
        line.add_row(*cells)
        return line


class _StatusLine:
    """A live status line at the bottom of a terminal; hidden for good once a debugger starts."""

    def __init__(self, progress: Progress) -> None:
        self._live = Live(
            get_renderable=progress.render,
            console=progress.console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )
        self._hook = sys.breakpointhook

    def start(self) -> None:
        """Show the line."""
        sys.breakpointhook = self._before_debugger
        self._live.start()

    def stop(self) -> None:
        """Show it no longer."""
        sys.breakpointhook = self._hook
        self._live.stop()

    def _before_debugger(self, *args: Any, **kwargs: Any) -> Any:
        self.stop()
        if self._hook is not sys.__breakpointhook__ or "PYTHONBREAKPOINT" in os.environ:
            return self._hook(*args, **kwargs)
        # the hook would stop in its caller, which is this method and not the code with `breakpoint()` in it
        pdb.Pdb().set_trace(sys._getframe(1))


class _Heartbeat(logging.Handler):
    """A log line where nothing else was logged for a while, for pipes and log files.

    It hears every log line, so that silence is counted from the last one.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self._started = progress.clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)

    def start(self) -> None:
        """Listen to the log, and watch over its silences."""
        logging.getLogger().addHandler(self)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()
        self._thread.join()
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a log line of anybody."""
        self.progress.heard()

    def _beat(self) -> None:
        while not self._ended.wait(0.5):
            self.say_if_due()

    def say_if_due(self) -> None:
        """Log the open phases if nothing was logged for long enough."""
        now = self.progress.clock()
        early = now - self._started < EARLY_SECONDS
        longest = EARLY_SILENCE if early else LATE_SILENCE
        if now - self.progress.last_output < longest - 1.0:
            return
        logger.info(self.progress.describe() or "working")


_SPINNER = Spinner("dots")

progress = Progress()
"""What this process is doing."""
