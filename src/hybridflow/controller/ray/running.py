"""One call on some ranks while it runs, and which of several failures is the one to report.

A rank that raises leaves the others waiting for it in a collective, and what they then raise is an echo. So
the first failure starts a moment of grace in which the others may answer; then the call ends with the failure
that came first, a lost process before all others.
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
    """A process of a pool, as the driver sees it."""

    place: Place
    actor: Any
    node_id: str = ""
    """Ray's."""
    pid: int = 0
    last_sign: float = field(default_factory=time.monotonic)
    """When it last answered anything."""
    pinged: bool = False
    """A ping is on its way."""
    cut_off: bool = False
    """A call in it ended because the connection broke."""
    ended: bool = False
    """It is lost, or we have killed it: nothing more is expected of it."""

    def __str__(self) -> str:
        return f"{self.place.pool}/{self.place.rank}"


@dataclass(eq=False)
class Running:
    """A call that has not ended."""

    role: str
    method: str
    waiting: dict[int, Process]
    """The ranks that have not answered."""
    parts: Mapping[int, RayPart]
    limit: float
    """Seconds that it may take."""
    limit_key: str
    """What to set where that is too short."""
    starting: str = ""
    """In words, of the call that waits for processes to start: they cannot show a stack yet."""
    started: float = field(default_factory=time.monotonic)
    reported: int = 0
    """How often it was said that it still runs."""
    failed_at: float | None = None
    """When the first rank failed."""
    errors: dict[int, tuple[float, Exception]] = field(default_factory=dict)
    """By rank: when it failed, by the clocks of the nodes, and with what."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    def fail(self, rank: int, error: Exception, at: float) -> None:
        """A rank has failed."""
        if rank in self.waiting:
            del self.waiting[rank]
            self.errors[rank] = (at, error)
            self.failed_at = self.failed_at or time.monotonic()

    def first_error(self) -> Exception:
        """The failure to report, with a note of the others. Of ranks that all failed alike, the lowest
        speaks.
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
                f"{self} did not end on ranks {sorted(self.waiting)}, which waited for it; their processes "
                "were ended"
            )
        return error

    def end(self, error: Exception) -> None:
        """Give up on what has not answered. Not under a lock: whoever waits for a part goes on here."""
        for part in self.parts.values():
            part.settle(error)
