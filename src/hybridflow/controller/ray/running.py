"""A call on some ranks while it runs, and the choice of the failure to report.

Where a rank raises, the others wait for it in a collective, and what they raise later is only a consequence.
So after the first failure the others have some seconds to answer; then the call ends with the failure that
came first. The loss of a process counts before every other failure.

`RayPart` is the driver's future for one rank's result: it is done when the rank says so, and the value is
fetched only when it is asked for. A part that is an argument of another call travels as a reference from
process to process; `Slot` marks its place among the arguments.

Failures of ranks become exceptions in the driver that say where and why.

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
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from hybridflow.controller.backend import Part
from hybridflow.controller.local import TensorVersions
from hybridflow.controller.ray.transport import StoredPacket, decode
from hybridflow.controller.worker import Place
from hybridflow.errors import WorkerError, WorkerLost, WorkerTraceback

if TYPE_CHECKING:
    from hybridflow.controller.ray.transfer_queue import TransferQueue

_MACHINERY = (
    os.path.dirname(ray.__file__) + os.sep,
    os.path.join(os.path.dirname(__file__), "process.py"),
    threading.__file__,
)
FETCH_SECONDS = 300.0


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


@dataclass(frozen=True)
class Slot:
    """A placeholder for the result of an earlier call; `index` counts the references that travel beside the
    arguments.
    """

    index: int


class Traffic:
    """A count of the bytes that the driver sends and receives by value, over all its threads."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count the bytes of a packet."""
        with self._lock:
            self._num_bytes += num_bytes

    def taken(self) -> int:
        """Return the count since this was asked last."""
        with self._lock:
            found = self._num_bytes
            self._num_bytes = 0
            return found


class RayPart(Part):
    """A `Part` whose value is in Ray's object store, or in `queue`, which has it until the part is gone."""

    def __init__(
        self,
        reference: Any,
        role: str,
        method: str,
        rank: int,
        traffic: Traffic,
        queue: TransferQueue | None = None,
    ) -> None:
        super().__init__()
        self._traffic = traffic
        self._queue = queue
        self.set_running_or_notify_cancel()  # the rank runs in any case: it cannot be cancelled
        self._reference = reference
        self.role = role
        self.method = method
        self.rank = rank
        self._settling = threading.Lock()
        self._fetching = threading.Lock()
        self._fetched: tuple[Any, TensorVersions] | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Mark the result as done, or as failed with `error`; later calls have no effect."""
        with self._settling:
            if self.done():
                return
            if error is None:
                self.set_result(None)
            else:
                self.set_exception(error)

    def is_held(self, held: StoredPacket) -> None:
        """Take note that the value is in the queue."""
        assert self._queue is not None, "values are held where there is a queue"
        weakref.finalize(self, self._queue.drop, held)

    def result(self, timeout: float | None = None) -> Any:
        """Return the rank's result, the same object at each call, or raise what the rank raised.

        Its tensors are views of shared memory. Raises TimeoutError after `timeout` seconds, and WorkerLost
        where the value was lost with its node.
        """
        super().result(timeout)
        with self._fetching:
            if self._fetched is None:
                try:
                    packet = ray.get(self._reference, timeout=FETCH_SECONDS)
                except (RayError, GetTimeoutError) as error:
                    message = (
                        f"the result of {self.role}.{self.method} on rank {self.rank} was lost with its "
                        f"node: {error}"
                    )
                    raise WorkerLost(message, role=self.role, rank=self.rank, method=self.method) from error
                if self._queue is not None:
                    packet = self._queue.opened(packet)
                self._traffic.add(packet.nbytes)
                value = decode(packet)
                self._fetched = value, TensorVersions(value)
            return self._fetched[0]

    @property
    def reference(self) -> Any:
        """The `ObjectRef` of the packet, for another process.

        Raises AssertionError where the driver has written into a tensor that the other process would read.
        """
        if self._fetched is not None:
            written = ", ".join(self._fetched[1].changed())
            assert not written, (
                f"{written} in the result of {self.role}.{self.method} was written in place: write to a clone"
            )
        return self._reference


@dataclass(eq=False)
class Process:
    """A worker process, as the driver knows it."""

    place: Place
    actor: Any
    node_id: str = ""
    """Ray's id of its node."""
    pid: int = 0
    last_sign: float = field(default_factory=time.monotonic)
    """When it last answered, by the monotonic clock."""
    pinged: bool = False
    """True while a ping has no answer yet."""
    cut_off: bool = False
    """True where a call in it ended because the connection broke."""
    ended: bool = False
    """True where it is lost or was killed, so that no answer is expected."""

    def __str__(self) -> str:
        return f"{self.place.pool}/{self.place.rank}"


@dataclass(eq=False)
class Running:
    """A call on some ranks that has not ended."""

    role: str
    method: str
    waiting: dict[int, Process]
    """The ranks that have not answered, with their processes."""
    parts: Mapping[int, RayPart]
    limit: float
    """Seconds that the call may take."""
    limit_key: str
    """The key to raise where the limit is too short."""
    starting: str = ""
    """Description of a call that waits for processes to start, which cannot show a stack yet; else empty."""
    started: float = field(default_factory=time.monotonic)
    reported: int = 0
    """How often the log has said that the call is still running."""
    failed_at: float | None = None
    """When the first rank failed, by the monotonic clock."""
    errors: dict[int, tuple[float, Exception]] = field(default_factory=dict)
    """By rank: when it failed, by the clock of its node, and the exception."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    def fail(self, rank: int, error: Exception, at: float) -> None:
        """Record that a rank has failed."""
        if rank in self.waiting:
            del self.waiting[rank]
            self.errors[rank] = (at, error)
            self.failed_at = self.failed_at or time.monotonic()

    def first_error(self) -> Exception:
        """Return the failure to report, with notes about the others; of equal failures that of the lowest
        rank.
        """
        text = {
            rank: f"{type(error).__name__}: {error}".partition("\n")[0]
            for rank, (_, error) in self.errors.items()
        }
        first = min(
            self.errors,
            key=lambda rank: (not isinstance(self.errors[rank][1], WorkerLost), self.errors[rank][0], rank),
        )
        alike = sorted(rank for rank in text if text[rank] == text[first])
        error = self.errors[alike[0]][1]
        if len(alike) > 1:
            error.add_note(f"the same on ranks {alike[1:]}")
        others = [f"rank {rank}: {text[rank]}" for rank in sorted(text) if rank not in alike]
        if others:
            error.add_note("then failed " + "; ".join(others))
        if self.waiting:
            error.add_note(
                f"{self} did not end on ranks {sorted(self.waiting)}, which waited for that rank; their "
                "processes were ended"
            )
        return error

    def end(self, error: Exception) -> None:
        """Fail all parts that have no result yet. Call it without a lock, since waiting threads go on from
        here.
        """
        for part in self.parts.values():
            part.settle(error)
