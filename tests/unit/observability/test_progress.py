from __future__ import annotations

import gc
import io
import itertools
import logging
import re

import pytest
from rich.console import Console

from hybridflow.observability import logging_setup
from hybridflow.observability import progress as module
from hybridflow.observability.importing import importing
from hybridflow.observability.progress import Progress
from hybridflow.observability.timing import Timer


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def console_of(*, terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None, force_terminal=terminal)


def test_what_is_done_is_told_from_the_outer_to_the_inner_with_counts() -> None:
    clock = Clock()
    progress = Progress(console_of(terminal=False), clock)
    timer = Timer(progress=progress)
    assert progress.describe() == "" and progress.place() == "before the first step"
    with progress.phase("loading the model"):
        assert progress.place() == "while loading the model"
    told = []
    with progress.steps(8), timer("step"):
        progress.step = 3
        with timer("gen"):
            clock.now = 7.0
            for _ in progress.results(iter("abc"), total=3):
                told.append(progress.describe())
        with timer("update_actor"):
            for _ in progress.each(["first", "second"], "mini-batch", 2):
                told.append(progress.describe())
        assert progress.place() == "in step 3/8"
        progress.finished_step = 3
        assert progress.place() == "after step 3/8"
        progress.step = 4
        assert progress.place() == "in step 4/8"
    assert told == [
        "step 3/8 · generating 1/3 · 7.0s",
        "step 3/8 · generating 2/3 · 7.0s",
        "step 3/8 · generating 3/3 · 7.0s",
        "step 3/8 · updating the actor · mini-batch 1/2 · 0.0s",
        "step 3/8 · updating the actor · mini-batch 2/2 · 0.0s",
    ]
    assert progress.describe() == "", "nothing is left of a run that is over"
    assert progress.place() == "while the run was ending"


def test_a_phase_ends_with_an_error() -> None:
    progress = Progress(console_of(terminal=False))
    with pytest.raises(ValueError), progress.phase("generating"):
        raise ValueError
    assert progress.describe() == ""


def test_a_pipe_has_a_line_after_each_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(module.threading.Thread, "join", lambda thread: None)
    clock = Clock()
    progress = Progress(console_of(terminal=False), clock)
    caplog.set_level(logging.INFO, logger="hybridflow")
    said: list[float] = []
    with progress.shown(), progress.phase("generating"):
        display = progress._display
        assert isinstance(display, module._Heartbeat)
        for second in range(600):
            clock.now = float(second)
            if second == 100:
                logging.getLogger("hybridflow").warning("something else")
            before = len(caplog.records)
            display.say_if_due()
            said += [clock.now] * (len(caplog.records) - before)
    gaps = [later - sooner for sooner, later in itertools.pairwise(said)]
    assert max(gap for gap, at in zip(gaps, said) if at < 280) <= 10
    assert max(gaps) <= 60, "later a line a minute"
    assert not [at for at in said if 100 < at < 108], "silence counts from the last line of anybody"
    assert "generating · 9.0s" in caplog.messages[0]


def test_a_terminal_has_a_line_that_moves() -> None:
    console = console_of(terminal=True)
    progress = Progress(console)
    with progress.shown(), progress.steps(8):
        progress.step = 3
        with progress.phase("generating", total=32) as phase, progress.shown():
            phase.done = 12
            assert progress._display is not None
            progress._display._live.refresh()  # type: ignore[attr-defined]
    assert re.search(r"step 3/8 · generating 12/32 · \d", console.file.getvalue())  # type: ignore[attr-defined]
    assert progress._display is None


@pytest.mark.parametrize(("columns", "lines"), [(20, 2), (100, 1)])
def test_a_log_line_keeps_its_room_on_a_narrow_terminal(
    columns: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(logging_setup, "console", Console(file=out, force_terminal=True, width=columns))
    handler = logging_setup._rich_handler()
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "twenty-five letters in all", (), None))
    assert len(out.getvalue().splitlines()) == lines


def test_no_garbage_is_collected_while_libraries_are_imported() -> None:
    with Progress(console_of(terminal=False)).importing():
        assert not gc.isenabled()
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one still imports"
    assert gc.isenabled()
