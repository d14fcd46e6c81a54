"""What ends a run before its last step, so that no finished work is lost: signals, and a machine's end.

SIGTERM and Ctrl-C are wishes to end it:

    signal ──► StopSignals ─┬─ nothing unsaved, work in progress can be thrown away ──► Stopped, at once
                            ├─ generation, scoring, validation ──► Stopped at the next point between two items
                            └─ an update, a save ──► it is finished first
    Stopped ──trainer──► the last whole step is saved ──command──► one sentence and the exit status

A second signal ends the run at once, whatever it is doing. One that comes right after the first is taken for
the same wish: `timeout` sends each signal twice, and a terminal's Ctrl-C may come with a SIGTERM of a parent.

A machine that is lent for a time says when it is taken back, and the run saves before that:

    an environment variable ──► Expiry ◄── seconds of steps and of saves
                                  └── due() after a step: no further step and save would be done in time
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
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


VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Environment variables in which platforms say when the machine is taken back."""
FIRST_SAVE_SECONDS = 60.0
"""Seconds that a save is taken to need before one was measured."""
MILLISECONDS = 1e11
"""A larger number cannot be seconds since 1970: that would be the year 5138."""


@dataclass
class Expiry:
    """The time at which the machine is taken back, and what it takes to save before it."""

    at: float | None = None
    """Seconds since 1970; None: nobody has said so."""
    redundant: float = 0.0
    """Further seconds that a save keeps from the end."""
    clock: Callable[[], float] = time.time
    longest_step: float = 0.0
    longest_save: float = 0.0

    def step_took(self, seconds: float) -> None:
        """Count a step; the longest one is what the next may take."""
        self.longest_step = max(self.longest_step, seconds)

    def save_took(self, seconds: float) -> None:
        """Count a save in the same way."""
        self.longest_save = max(self.longest_save, seconds)

    def due(self) -> bool:
        """Return whether to save now: after one more step there may be no time for it.

        False where nobody has said when the machine ends, and where that time has passed.
        """
        if self.at is None:
            return False
        left = self.at - self.clock()
        needed = self.longest_step + (self.longest_save or FIRST_SAVE_SECONDS) + self.redundant
        if not 0 < left <= needed:
            return False
        logger.warning(
            "the machine is taken back in %.0f s, and a step and a save may take %.0f s: saving now",
            left,
            needed,
        )
        return True


def expiry_of(redundant: float, environment: Mapping[str, str] = os.environ) -> Expiry:
    """Return what the environment says; a value that is no time is told and not used.

    A value is seconds or milliseconds since 1970, or a date and time in ISO 8601, without a zone in UTC.
    """
    for name in VARIABLES:
        value = environment.get(name, "").strip()
        if not value:
            continue
        at = _seconds(value)
        if at is None:
            logger.warning(
                "%s=%s is no time: wanted seconds since 1970, or 2026-01-31T12:00:00Z", name, value
            )
            continue
        said = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        if at <= time.time():
            logger.warning("%s=%s (%s) has passed and is not used", name, value, said)
            continue
        logger.info("the machine is taken back at %s (%s): the run saves before it", said, name)
        return Expiry(at, redundant)
    return Expiry(redundant=redundant)


def _seconds(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    if number > MILLISECONDS:
        number /= 1000
    if 0 < number < MILLISECONDS:
        return number
    return None
