"""SIGTERM and Ctrl-C as a wish to end a run, honoured where no finished work is lost.

    signal ──► StopSignals ─┬─ nothing unsaved, work in progress can be thrown away ──► Stopped, at once
                            ├─ generation, scoring, validation ──► Stopped at the next point between two items
                            └─ an update, a save ──► it is finished first
    Stopped ──trainer──► the last whole step is saved ──command──► one sentence and the exit status

A second signal ends the run at once, whatever it is doing. One that comes right after the first is taken for
the same wish: `timeout` sends each signal twice, and a terminal's Ctrl-C may come with a SIGTERM of a parent.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hybridflow.checkpoint.layout import step_folders
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.errors import CheckpointError, Stopped
from hybridflow.observability.progress import progress

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SAME_WISH_SECONDS = 1.0
"""Seconds after the first signal in which others change nothing."""


class StopSignals:
    """Catches SIGINT and SIGTERM inside its context; outside of one it never asks for anything."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._came = 0.0  # when the first signal did, by the monotonic clock
        self._unsaved: Callable[[], bool] = _nothing_unsaved
        self._may_leave = True
        self._leaving = False  # a Stopped was raised: what ends the run now must come to its own end
        self._before: dict[int, Any] = {}
        self._hook = progress.between_items

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
            self.install()
        self._hook = progress.between_items
        progress.between_items = self._leave_between_items
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        progress.between_items = self._hook

    def install(self) -> None:
        """Set the handlers, again where a library has set its own (Ray does when it connects)."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise Stopped if a signal has come; called where all that was done can be saved."""
        if self._number is not None:
            self._leaving = True
            raise Stopped(self._number, progress.place())

    @contextmanager
    def training(self, unsaved: Callable[[], bool]) -> Iterator[None]:
        """The loop of a trainer, which is left only where it allows it; `unsaved` says whether steps are done
        that no checkpoint has and one should have.
        """
        self._may_leave = False
        self._unsaved = unsaved
        try:
            yield
        finally:
            self._unsaved = _nothing_unsaved
            self._may_leave = True

    @contextmanager
    def leavable(self) -> Iterator[None]:
        """Work that can be thrown away: weights, optimizers and data position are not those of its middle."""
        self.check()
        self._may_leave = True
        try:
            yield
            self.check()
        finally:
            self._may_leave = False

    def _leave_between_items(self) -> None:
        if self._may_leave and not self._leaving and threading.current_thread() is threading.main_thread():
            self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            if time.monotonic() - self._came < SAME_WISH_SECONDS:
                return
            for each, handler in self._before.items():
                signal.signal(each, handler)
            self._leaving = True
            raise Stopped(number, progress.place(), at_once=True)
        self._number = number
        self._came = time.monotonic()
        if self._may_leave and (progress.can_break_off or not self._unsaved()):
            self._leaving = True
            raise Stopped(number, progress.place())
        name = signal.Signals(number).name
        doing = progress.describe() or "the run"
        then = "ends" if self._may_leave or not self._unsaved() else "is saved and ends"
        text = f"{name}: the run {then} as soon as possible; now: {doing}. A second signal ends it at once"
        # in a thread of its own: the signal may have come while this one was writing a log line
        threading.Thread(target=logger.warning, args=("%s", text), daemon=True).start()


@contextmanager
def stopping(config: PPOConfig | SFTConfig) -> Iterator[StopSignals]:
    """Catch the signals of a run; a Stopped that leaves the context says what is saved and how to go on."""
    try:
        with StopSignals() as signals:
            yield signals
    except Stopped as stopped:
        stopped.message = closing_words(config, stopped.where)
        raise


def closing_words(config: PPOConfig | SFTConfig, where: str) -> str:
    """Where a run was interrupted, its newest checkpoint, and what goes on from it."""
    trainer = config.trainer
    newest = newest_checkpoint(Path(trainer.default_local_dir).expanduser())
    if newest is None:
        return f"interrupted {where}; there is no checkpoint yet; the same command starts anew"
    ways = {
        "auto": "the same command goes on",
        "disable": "trainer.resume_mode=auto goes on from it; the same command starts anew",
        "resume_path": (
            "trainer.resume_mode=auto goes on from it; the same command starts from "
            f"{trainer.resume_from_path}"
        ),
    }
    return f"interrupted {where}; newest checkpoint {newest.name}; {ways[trainer.resume_mode]}"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of a run folder that was saved last, by its manifest alone; None without any."""
    found: dict[int, Path] = {}
    for folder in step_folders(run_dir):
        with suppress(CheckpointError):
            found[read_manifest(folder).sequence] = folder
    if not found:
        return None
    return found[max(found)]


def _nothing_unsaved() -> bool:
    return False
