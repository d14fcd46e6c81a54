"""Signals that end a run before its last step, as a token that loops ask, so that no finished work is lost.

SIGTERM and Ctrl-C are wishes to end the run:

    signal ──► StopToken ─┬─ nothing unsaved, or the next item of `each` is awaited ──► Stopped, at once
                          ├─ generation, scoring, validation ──► Stopped where their loops `check`
                          └─ an update, a save ──► it is finished first, and the loop of steps has `stop_here`
    Stopped ──trainer──► the last whole step is saved ──command──► one sentence and the exit status

A second signal ends the run at once, whatever it is doing. One that comes right after the first is taken for
the same wish: `timeout` sends each signal twice, and a terminal's Ctrl-C may come with a SIGTERM of a parent.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from hybridflow.errors import Stopped
from hybridflow.observability.progress import progress

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SAME_WISH_SECONDS = 1.0
"""Seconds after the first signal in which others change nothing."""


class StopToken:
    """Whether this process is asked to end its run; never outside of `listening`."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._number: int | None = None
        self._came = 0.0  # when the first signal did, by the monotonic clock
        self._unsaved: Callable[[], bool] = _nothing_unsaved
        self._may_leave = True
        self._can_break_off = False
        self._leaving = False  # a Stopped was raised: what ends the run now must come to its own end

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch SIGINT and SIGTERM.

        Python gives signals to the main thread alone. In another thread, and within another `listening`,
        whose signals also end what is done here, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread() or self._before:
            yield
            return
        self._forget()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            self._restore()
            self._before = {}
            self._forget()

    def install(self) -> None:
        """Set the handlers, again where a library has set its own (Ray does when it connects, which it can in
        the main thread alone).
        """
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, self._on_signal)

    def stop_here(self) -> None:
        """Raise Stopped if a signal has come; called where all that was done can be saved."""
        if self._number is not None:
            self._leaving = True
            raise Stopped(self._number, progress.place())

    def check(self) -> None:
        """Raise Stopped if a signal has come and the present work can be discarded.

        Loops call it between two items. In other threads than the main one it does nothing.
        """
        if self._may_leave and not self._leaving and threading.current_thread() is threading.main_thread():
            self.stop_here()

    def each(self, items: Iterator[T]) -> Iterator[T]:
        """Go through items with a `check` before each; a signal while the next one is awaited ends that.

        Where an exception ends the loop, a generator of items is closed at once, so that their source
        can be used again.
        """
        try:
            while True:
                self.check()
                with self.breakable():
                    item = next(items, _END)
                if item is _END:
                    return
                yield item
        finally:
            if isinstance(items, Generator):
                items.close()

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Let a signal interrupt the await in this context, where that is safe; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._can_break_off = True
        try:
            yield
        finally:
            self._can_break_off = False

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
        self.stop_here()
        before = self._may_leave
        self._may_leave = True
        try:
            yield
            self.stop_here()
        finally:
            self._may_leave = before

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            if time.monotonic() - self._came < SAME_WISH_SECONDS:
                return
            self._restore()
            self._leaving = True
            raise Stopped(number, progress.place(), at_once=True)
        self._number = number
        self._came = time.monotonic()
        if self._may_leave and (self._can_break_off or not self._unsaved()):
            self.stop_here()
        name = signal.Signals(number).name
        doing = progress.describe() or "the run"
        then = "ends" if self._may_leave or not self._unsaved() else "is saved and ends"
        text = f"{name}: the run {then} as soon as possible; now: {doing}. A second signal ends it at once"
        # in a separate thread: the signal may have come while this one was writing a log line
        threading.Thread(target=logger.warning, args=("%s", text), daemon=True).start()


def _nothing_unsaved() -> bool:
    return False


_END: Any = object()

stop_token = StopToken()
"""The token of this process, which has one handler for each signal."""
