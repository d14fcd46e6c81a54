"""A thread that drives the session of one engine for callers in other threads and event loops.

submit ──inbox──► thread: add, abort, step ──► futures (finished), taps (growing)
pause ──► the thread stands between two steps ──► weights are swapped ──► resume
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import EngineSession, GenerationOutput, GenerationRequest, PartialOutput

logger = logging.getLogger(__name__)


class ReplicaLost(RolloutError):
    """The replica that served a request died or was closed; the message names it and says of what."""


class Tap(Protocol):
    """Receiver of the pieces of one response as it grows; called in the replica's thread."""

    wants: bool
    """False while the newest piece was not read yet: nothing is copied for a slow reader."""

    def put(self, partial: PartialOutput) -> None: ...


@dataclass(eq=False)
class _Ticket:
    request: GenerationRequest
    tap: Tap | None
    added: bool = False
    """Whether the session has the request."""
    seen: int = 0
    """Tokens that the tap was given."""
    answer: Future[GenerationOutput] = field(default_factory=Future)


class EngineReplica:
    """One engine behind a thread; every method may be called from any thread.

    `open_session` is called in the thread (an engine's `open`). An error of the engine ends the replica:
    requests that finished before keep their outputs, the others get ReplicaLost, and so do all that are
    submitted later.
    """

    def __init__(self, open_session: Callable[[], EngineSession], *, name: str = "native-0") -> None:
        self.name = name
        self._open_session = open_session
        self._changed = threading.Condition()
        self._tickets: dict[int, _Ticket] = {}
        self._inbox: list[_Ticket] = []
        self._aborts: set[int] = set()
        self._pausing = self._parked = self._closing = False
        self._failure: str | None = None
        self._num_running = 0
        self._version: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollout {name}", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Number of requests that were submitted and not answered."""
        return len(self._tickets)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests, as of the newest step."""
        running = self._num_running
        return running, max(self.load - running, 0)

    @property
    def waiting(self) -> int:
        """Requests that had no room in the engine in the newest step."""
        return self.counts[1]

    @property
    def clock(self) -> float:
        """Seconds that deadlines count: those of the machine."""
        return time.monotonic()

    @property
    def failure(self) -> str | None:
        """Reason why the replica serves no more requests, or None."""
        return self._failure

    @property
    def version(self) -> int | None:
        """Version of the weights, as the session said after its newest step; None before there was one."""
        return self._version

    def submit(self, request: GenerationRequest, tap: Tap | None = None) -> Future[GenerationOutput]:
        """Return a future of the output, whose pieces go to `tap` as it grows.

        RolloutError for an id that is running, ReplicaLost for a dead replica.
        """
        return self._join([_Ticket(request, tap)])[0]

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Future[GenerationOutput]]:
        """Return futures of requests that join before the same step; errors as in `submit`: none joins."""
        return self._join([_Ticket(request, None) for request in requests])

    def _join(self, tickets: Sequence[_Ticket]) -> list[Future[GenerationOutput]]:
        ids = [ticket.request.request_id for ticket in tickets]
        for ticket in tickets:
            # a caller that gives up says abort(); the future itself cannot be cancelled
            ticket.answer.set_running_or_notify_cancel()
        with self._changed:
            if self._failure is not None:
                raise ReplicaLost(self._failure)
            for place, number in enumerate(ids):
                if number in self._tickets or number in ids[:place]:
                    raise RolloutError(f"request {number} is running already: request ids must be unique")
            self._tickets |= dict(zip(ids, tickets))
            self._aborts -= set(ids)  # they were meant for requests that ended by themselves
            self._inbox += tickets
            self._changed.notify_all()
        return [ticket.answer for ticket in tickets]

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests, unknown ones aside, after the running step: they get what they have."""
        with self._changed:
            self._aborts.update(request_ids)
            self._changed.notify_all()

    def pause(self, timeout_s: float = 60.0) -> None:
        """Return when the thread stands between two steps; RolloutError where that takes too long."""
        with self._changed:
            self._pausing = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._parked or self._failure is not None, timeout_s):
                self._pausing = False
                raise RolloutError(
                    f"replica {self.name} did not come to the end of a step within {timeout_s:g} s "
                    "(deadline of pause)"
                )
            if self._failure is not None:
                raise ReplicaLost(self._failure)

    def resume(self) -> None:
        """Go on; the next tokens carry the version of the weights there are now."""
        with self._changed:
            self._pausing = False
            self._changed.notify_all()

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread and its session, once; requests without an answer get ReplicaLost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RolloutError(f"replica {self.name} did not end within {timeout_s:g} s (deadline of close)")

    def _run(self) -> None:
        try:
            session = self._open_session()
            try:
                while self._turn(session):
                    pass
            finally:
                session.close()
        except BaseException as error:  # whatever ends this thread, nobody may wait for it any longer
            logger.exception("replica %s died", self.name)
            self._end(f"replica {self.name} died: {type(error).__name__}: {error}")
        else:
            self._end(f"replica {self.name} was closed")

    def _turn(self, session: EngineSession) -> bool:
        """Do one round of the session; return False when the replica is to end."""
        with self._changed:
            while not self._closing and (
                self._pausing or (not (self._inbox or self._aborts) and session.idle)
            ):
                self._parked = self._pausing
                self._changed.notify_all()
                self._changed.wait()
            self._parked = False
            if self._closing:
                return False
            new = self._inbox
            self._inbox = []
            ended = self._aborts & self._tickets.keys()
            self._aborts = set()
        if new:
            self._answer(session, session.add([ticket.request for ticket in new]))
            for ticket in new:
                ticket.added = True
        with self._changed:  # some of them may have been answered, and others have joined
            ended &= self._tickets.keys()
        if ended:
            self._answer(session, session.abort(ended))
        if not session.idle:
            self._answer(session, session.step())
        self._num_running = session.num_running
        self._grow(session)
        return True

    def _answer(self, session: EngineSession, outputs: Iterable[GenerationOutput]) -> None:
        self._version = session.policy_version  # before its tokens are out
        for output in outputs:
            with self._changed:
                ticket = self._tickets.pop(output.request_id)
            ticket.answer.set_result(output)

    def _grow(self, session: EngineSession) -> None:
        """Give each tap that waits the tokens that are new to it, and no others."""
        with self._changed:  # requests join meanwhile
            tickets = list(self._tickets.items())
        taps = {
            number: one.tap for number, one in tickets if one.tap is not None and one.tap.wants and one.added
        }
        if not taps:
            return
        for partial in session.so_far({number: one.seen for number, one in tickets if number in taps}):
            if partial.token_ids:
                self._tickets[partial.request_id].seen += len(partial.token_ids)
                taps[partial.request_id].put(partial)

    def _end(self, failure: str) -> None:
        with self._changed:
            self._failure = failure
            self._parked = False
            left = list(self._tickets.values())
            self._tickets = {}
            self._inbox = []
            self._num_running = 0
            self._changed.notify_all()
        for ticket in left:
            ticket.answer.set_exception(ReplicaLost(failure))
