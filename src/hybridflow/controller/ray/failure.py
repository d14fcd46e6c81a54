"""What a rank sends in the place of a result, and what the driver makes of it: an exception that says where
and why.

rank: exception ──Failure.of──► Failure ──travels──► driver: the same exception, with notes of its place,
caused by its traceback there
rank: gone ──Ray's word for it──► driver: WorkerLost with the cause in plain words
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
    """An exception of another process."""

    error: bytes | None
    """Pickled; None where it cannot travel, and is known by its text alone."""
    text: str
    traceback: str
    place: Place
    pid: int
    at: float
    """Seconds since the epoch: whose came first."""

    @classmethod
    def of(cls, error: BaseException, place: Place) -> Failure:
        """The failure of this process."""
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
        """What was raised; WorkerError with its text where it cannot be had itself."""
        if self.error is not None:
            with contextlib.suppress(Exception):  # its class may not be to be had in this process
                error: Exception = pickle.loads(self.error)
                return error
        return WorkerError(self.text)

    def exception(self, role: str, method: str, rank: int) -> Exception:
        """What is raised in the driver: the original, with notes of where it was; its cause, printed before
        it, is its traceback there.
        """
        error = self.original()
        notes = getattr(error, "__notes__", [])
        if not any(f"{role}.{method}, rank {rank}" in note for note in notes):
            error.add_note(f"in {role}.{method}, rank {rank}")
        error.add_note(f"there: pool {self.place.pool}, node {self.place.node}, process {self.pid}")
        error.__cause__ = WorkerTraceback(self.traceback)
        return error


def telling(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The frames that say something: without those of Ray, of the thread module and of the process that
    serves the calls.
    """
    return traceback.StackSummary.from_list(
        [frame for frame in stack if not frame.filename.startswith(_MACHINERY)]
    )


def lost(
    cause: str, place: Place, pid: int, *, role: str = "", method: str = "", rank: int = -1
) -> WorkerLost:
    """The error for a process that is gone."""
    doing = f" during {role}.{method}" if role else ""
    who = f"{role} rank {rank}" if role else f"rank {place.rank} of pool {place.pool}"
    where = f"pool {place.pool}, node {place.node or 'unknown'}, process {pid or 'not started'}"
    return WorkerLost(f"{who} is lost{doing} ({where}): {cause}", role=role, rank=rank, method=method)


def cause_of(error: BaseException) -> str:
    """Why a process is gone, from what Ray says about it."""
    text = str(error)
    if (
        isinstance(error, ray.exceptions.OutOfMemoryError)
        or "memory monitor" in text
        or "low on memory" in text
    ):
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
            "its process ended without a word, as after signal 9 (killed: out of memory? `dmesg` on the "
            "node says so) or a crash in "
            "native code (its last lines are in Ray's log of the worker)"
        )
    _, found, detail = text.partition("Worker exit detail:")
    return f"its process ended: {detail.strip()}" if found else _last_line(text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gave no reason"
