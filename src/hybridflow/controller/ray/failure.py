"""Failures of ranks, as exceptions in the driver that say where and why.

a rank raises     Failure.of(exception) travels ──► the same exception in the driver, with notes that say
                  where it was raised; its cause is the traceback of the rank
a rank is lost    Ray's message about it ──► WorkerLost with the cause in plain words
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import traceback
from dataclasses import dataclass

import ray
import ray.exceptions
from ray import cloudpickle

from hybridflow.controller.worker import Place
from hybridflow.errors import WorkerError, WorkerLost, WorkerTraceback

_MACHINERY = (
    os.path.dirname(ray.__file__) + os.sep,
    os.path.join(os.path.dirname(__file__), "process.py"),
    threading.__file__,
)


@dataclass(frozen=True)
class Failure:
    """An exception that was raised in another process."""

    error: bytes | None
    """The pickled exception; None where it cannot be pickled and only its text is known."""
    text: str
    traceback: str
    place: Place
    pid: int
    at: float
    """When it was raised, in seconds since the epoch; it decides which failure came first."""

    @classmethod
    def of(cls, error: BaseException, place: Place) -> Failure:
        """Return the failure for an exception of this process."""
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)  # some exceptions can be written but not read
        except Exception:  # whatever an exception's own fields raise when they are pickled
            pickled = None
        trace = traceback.TracebackException.from_exception(error)
        trace.stack = telling(trace.stack)
        text = f"{type(error).__name__}: {error}"
        return cls(pickled, text, "".join(trace.format()).rstrip(), place, os.getpid(), time.time())

    def original(self) -> Exception:
        """Return the exception that was raised; where it cannot be unpickled, a WorkerError with its text."""
        if self.error is not None:
            with contextlib.suppress(Exception):  # its class may be missing in this process
                error: Exception = pickle.loads(self.error)
                return error
        return WorkerError(self.text)

    def exception(self, role: str, method: str, rank: int) -> Exception:
        """Return the exception to raise in the driver: the original with notes that say where it was raised.

        Its cause, which Python prints first, is the traceback that it had in the rank.
        """
        error = self.original()
        notes = getattr(error, "__notes__", [])
        if not any(f"{role}.{method}, rank {rank}" in note for note in notes):
            error.add_note(f"in {role}.{method}, rank {rank}")
        error.add_note(f"there: pool {self.place.pool}, node {self.place.node}, process {self.pid}")
        error.__cause__ = WorkerTraceback(self.traceback)
        return error


def telling(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames that are not Ray's, nor those of `threading` and of `process.py`."""
    return traceback.StackSummary.from_list(
        [frame for frame in stack if not frame.filename.startswith(_MACHINERY)]
    )


def lost(
    cause: str, place: Place, pid: int, *, role: str = "", method: str = "", rank: int = -1
) -> WorkerLost:
    """Return the error for a process that is gone."""
    who = f"rank {place.rank} of pool {place.pool}"
    doing = ""
    if role:
        who = f"{role} rank {rank}"
        doing = f" during {role}.{method}"
    where = f"pool {place.pool}, node {place.node or 'unknown'}, process {pid or 'not started'}"
    return WorkerLost(f"{who} is lost{doing} ({where}): {cause}", role=role, rank=rank, method=method)


def cause_of(error: BaseException) -> str:
    """Return the reason that a process is gone, made from Ray's message about it."""
    text = str(error)
    low = "memory monitor" in text or "low on memory" in text
    if low or isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"Ray ended it because its node ran low on memory: {_last_line(text)}"
    if "ray.kill" in text:
        return "it was ended by ray.kill"
    if "creation task" in text:
        return f"it could not start: {text.strip()}"
    if isinstance(error, ray.exceptions.ActorUnschedulableError | ray.exceptions.ActorPlacementGroupRemoved):
        return f"its place is gone: {_last_line(text)}"
    if "node" in text and ("died" in text or "dead" in text) and "Worker exit detail" not in text:
        return f"its node is gone: {_last_line(text)}"
    if "connection error code 2" in text:
        return (
            "its process ended without a message, as after signal 9 (if it ran out of memory, `dmesg` on the "
            "node says so) or after a crash in native code (its last lines are in Ray's log of the worker)"
        )
    _, found, detail = text.partition("Worker exit detail:")
    if found:
        return f"its process ended: {detail.strip()}"
    return _last_line(text)


def _last_line(text: str) -> str:
    for line in reversed(text.splitlines()):
        if line.strip():
            return line.strip()
    return "Ray gave no reason"
