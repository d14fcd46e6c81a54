"""A call on some ranks while it runs, and the choice of the failure to report.

Where a rank raises, the others wait for it in a collective, and what they raise later is only a consequence.
So after the first failure the others have some seconds to answer; then the call ends with the failure that
came first. The loss of a process counts before every other failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.controller.ray.parts import RayPart
from hybridflow.controller.worker import Place
from hybridflow.errors import WorkerLost


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
