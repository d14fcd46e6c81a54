"""The loop that drives one engine, for serving, training and agents: requests join and leave between steps.

    submit, abort ──inbox──► thread: add, abort, step ──► futures (finished), taps (growing)
    update_weights ──────────► between two steps of it
    pause ──► the thread ends ── resume ──► another goes on, with what was begun

The ranks of a replica each have such a loop. All take the same steps: the first one has the requests, and
broadcasts new ones to the others before each step.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from hybridflow.distributed.device import set_current
from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import RolloutError
from hybridflow.observability.profiling import profiler
from hybridflow.observability.timing import Occupancy
from hybridflow.rollout.base import (
    EngineSession,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    RolloutStats,
)
from hybridflow.rollout.session_engine import check_ids

logger = logging.getLogger(__name__)

STEPS_PER_TALK = 16
"""Steps of a closed session between exchanges of the ranks: nothing can join, and a pause may come late."""
CHANGE_SECONDS = 600.0
"""Longest wait of a later rank for a change of the weights that the first rank has been given."""
SPAN_SECONDS = 5.0
"""Longest span of a profile that covers steps of the engine: a step of training may begin within one."""
IDLE_SECONDS = 10.0
"""Longest time between two exchanges of the ranks: the collective of a rank that waits has a limit."""


class ReplicaLost(RolloutError):
    """The replica that served a request died or was closed; the message names it and the cause."""


class Tap(Protocol):
    """Receiver of the pieces of one response as it grows; called in the replica's thread."""

    wants: bool
    """False while the newest piece was not read yet: nothing is copied for a slow reader."""

    def put(self, partial: PartialOutput) -> None: ...


class ReplicaEngine(Protocol):
    """The part of a `RolloutEngine` that a replica needs; it is awake while a session is open."""

    @property
    def stats(self) -> RolloutStats: ...

    def open(self, *, closed: bool = False) -> EngineSession: ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


class ReplicaUse:
    """Seconds in which one engine is busy, standing or empty, over all replicas that take turns with it.

    busy: it is stepped, and has requests without an answer. standing: there are such requests, and it is not
    stepped, for new weights or because its device trains. empty: there is no request.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = threading.Lock()
        self._asked: set[object] = set()
        self._stepped: set[object] = set()
        self._occupancy = Occupancy("empty", clock)

    def note(self, replica: object, *, asked: bool | None = None, stepped: bool | None = None) -> None:
        """Note whether a replica has requests without an answer, and whether its engine is stepped."""
        with self._lock:
            for replicas, there in ((self._asked, asked), (self._stepped, stepped)):
                if there:
                    replicas.add(replica)
                elif there is not None:
                    replicas.discard(replica)
            state = "empty"
            if self._asked:
                state = "busy" if self._asked & self._stepped else "standing"
            self._occupancy.be(state)

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each state since the start."""
        return self._occupancy.seconds()


@dataclass(eq=False)
class _Ticket:
    request: GenerationRequest
    """With its partial response, once it was preempted."""
    tap: Tap | None
    added: bool = False
    """Whether the session has the request."""
    seen: int = 0
    """Tokens that the tap was given."""
    answer: Future[GenerationOutput] = field(default_factory=Future)


@dataclass(frozen=True)
class _Change:
    """A change to be made between two steps."""

    work: Callable[[], None]
    preempts: bool
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class Commands:
    """The commands of callers since the last step, the same on all ranks of the replica."""

    joined: tuple[GenerationRequest, ...] = ()
    aborted: tuple[int, ...] = ()
    changes: int = 0
    """Number of changes that are to be made before the next step."""
    pause: Literal["keep", "preempt"] | None = None


class EngineReplica:
    """One engine behind a thread; every method may be called from any thread. `resume` waits for an
    `update_weights` that has begun while the engine stood.

    With `paused` it begins at the first `resume`, else at once. `ranks` step together: all of them are
    resumed, paused and changed, and the first one has the requests. `device` is made the current one of the
    thread. `use` is called with whether there is work.

    An error of the engine ends the replica: requests that finished before keep their outputs, the others get
    ReplicaLost, and so do all that are submitted later. `ended` is called with that error and the number of
    requests that it left; without it the log has the error.
    """

    def __init__(
        self,
        engine: ReplicaEngine,
        *,
        name: str = "native-0",
        ranks: ReplicaRanks | None = None,
        device: torch.device | None = None,
        paused: bool = False,
        use: ReplicaUse | None = None,
        ended: Callable[[BaseException, int], None] | None = None,
    ) -> None:
        self.name = name
        self._engine = engine
        self._ranks = ranks or ReplicaRanks()
        self._device = device
        self._use = use or ReplicaUse()
        self._ended = ended
        self._changed = threading.Condition()
        self._standing = threading.Lock()  # held by what happens to an engine that stands
        self._thread: threading.Thread | None = None  # None: the engine stands
        self._ending = False  # whether the thread steps no more
        self._session: EngineSession | None = None
        self._closed = False  # whether the session has all its requests, and ends when they are answered
        self._rounds = 0  # of the session
        self._running: dict[int, GenerationRequest] = {}  # that the session has
        self._tickets: dict[int, _Ticket] = {}
        self._inbox: list[_Ticket] = []
        self._aborts: set[int] = set()
        self._changes: deque[_Change] = deque()
        self._pause: Literal["keep", "preempt"] | None = None
        self._failure: str | None = None
        self._version: int | None = None
        self._stats: list[RolloutStats] = []  # of sessions that have ended since `resume`
        self._tokens = 0  # that the session has read and sampled
        self._moved = time.monotonic()
        if not paused:
            self.resume()

    @property
    def load(self) -> int:
        """Number of requests that were submitted and not answered."""
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Requests without an answer that get no tokens now: all of them where the engine is paused."""
        session = self._session
        if session is None or self.stands:
            return self.load
        return max(0, self.load - session.num_running)

    @property
    def crowded_out(self) -> int:
        """Requests that have joined the session and get no tokens now, for want of room."""
        session = self._session
        if session is None or self.stands:
            return 0
        return max(0, len(self._running) - session.num_running)

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

    @property
    def stands(self) -> bool:
        """Whether the engine is not stepped: before the first `resume`, and after a pause or an end."""
        return self._thread is None

    @property
    def silence(self) -> float:
        """Seconds for which the engine has read and sampled no token although requests waited for it."""
        if self.stands or not (self._tickets or self._running):
            return 0.0
        return time.monotonic() - self._moved

    def submit(self, request: GenerationRequest, tap: Tap | None = None) -> Future[GenerationOutput]:
        """Return a future of the output, whose pieces go to `tap` as it grows.

        RolloutError for an id that is running, ReplicaLost for a dead replica.
        """
        return self._join([_Ticket(request, tap)])[0]

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Future[GenerationOutput]]:
        """Return futures of requests that join before the same step; errors as in `submit`: none joins."""
        return self._join([_Ticket(request, None) for request in requests])

    def _join(self, tickets: Sequence[_Ticket]) -> list[Future[GenerationOutput]]:
        for ticket in tickets:
            # a caller that gives up says abort(); the future itself cannot be cancelled
            ticket.answer.set_running_or_notify_cancel()
        with self._changed:
            if self._failure is not None:
                raise ReplicaLost(self._failure)
            check_ids([ticket.request for ticket in tickets], self._tickets)
            if not self._tickets:
                self._moved = time.monotonic()
            for ticket in tickets:
                self._tickets[ticket.request.request_id] = ticket
                # an abort that came before was meant for a request that has ended by itself
                self._aborts.discard(ticket.request.request_id)
            self._inbox += tickets
            self._use.note(self, asked=bool(self._tickets))
            self._changed.notify_all()
        return [ticket.answer for ticket in tickets]

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests, unknown ones aside, after the running step: they return their tokens so far."""
        with self._changed:
            self._aborts.update(request_ids)
            self._changed.notify_all()

    def pause(self, timeout_s: float | None = 60.0, *, keep_kv: bool = True) -> RolloutStats:
        """Return when the engine is not stepped any more, with the counts of the sessions since `resume`.

        With `keep_kv` the session stays open, with all its keys and values. Else it ends, and the engine
        sleeps: its requests go on after `resume` with the tokens that they have, under the weights of then.
        RolloutError where the running step takes longer than `timeout_s` (None: there is no limit),
        ReplicaLost where the engine has died.
        """
        with self._changed:
            self._pause = "keep" if keep_kv else "preempt"
            self._changed.notify_all()
            try:
                stands = self._changed.wait_for(lambda: self.stands, timeout_s)
            finally:  # also where the wait is interrupted: a later `resume` would end at once
                self._pause = None
            if not stands:
                raise RolloutError(
                    f"replica {self.name} did not come to the end of a step within {timeout_s:g} s "
                    "(deadline of pause)"
                )
            if self._failure is not None:
                raise ReplicaLost(self._failure)
        with self._standing:
            if self.stands and self._session is not None and not keep_kv:  # an earlier pause has kept it
                self._preempt()
        return self.stats()

    def resume(self, *, closed: bool = False) -> None:
        """Go on; the next tokens carry the version of the weights there are now.

        Where that opens a session, a `closed` one has the requests that wait now, and ends, with its engine
        asleep, when they are answered. ReplicaLost for a dead replica.
        """
        with self._standing, self._changed:
            if self._ending:  # a closed session has just ended by itself
                self._changed.wait_for(lambda: self.stands)
            if self._failure is not None:
                raise ReplicaLost(self._failure)
            if self._thread is not None:
                return
            if self._session is None:
                self._closed = closed
            self._stats = []
            self._moved = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=f"rollout {self.name}", daemon=True)
            self._thread.start()

    def update_weights(self, update: Callable[[], None], *, preempts: bool = False) -> None:
        """Run `update` between two steps, in the thread that takes them; at once where the engine stands.

        With `preempts`, running requests go on in another session, which computes all keys and values again;
        else these stay as the old weights made them. Raises what `update` raises.
        """
        change = _Change(update, preempts)
        with self._standing:
            with self._changed:
                stands = self.stands
                if not stands:
                    self._changes.append(change)
                    self._changed.notify_all()
            if stands:
                self._make(change)
        change.done.result()

    def stats(self) -> RolloutStats:
        """Return the counts of the sessions since `resume`."""
        parts = list(self._stats)
        if self._session is not None:
            parts.append(self._engine.stats)
        return RolloutStats.join(parts, together=False)

    def stack(self) -> str:
        """Return the stack of the thread that steps the engine, for a message; empty while paused."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def forget(self, failure: str) -> None:
        """End all requests without an answer; their callers get ReplicaLost at once."""
        with self._changed:
            left = self._tickets
            self._tickets = {}
            self._inbox = []
            self._aborts.update(left)
            self._use.note(self, asked=False)
            self._changed.notify_all()
        for ticket in left.values():
            ticket.answer.set_exception(ReplicaLost(failure))

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread and its session, once; requests without an answer get ReplicaLost."""
        with self._changed:
            self._failure = self._failure or f"replica {self.name} was closed"
        self.forget(self._failure)
        with self._changed:
            self._pause = "keep"
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.stands, timeout_s):
                raise RolloutError(
                    f"replica {self.name} did not end within {timeout_s:g} s (deadline of close)"
                )
        self._leave_session()

    # ---- in the thread

    def _run(self) -> None:
        try:
            if self._device is not None:
                set_current(self._device)  # the current device is a thread's own
            self._use.note(self, stepped=True)
            goes_on = True
            while goes_on:
                with profiler.span("rollout.steps"):
                    until = time.monotonic() + SPAN_SECONDS
                    while goes_on and time.monotonic() < until:
                        goes_on = self._round()
        except BaseException as error:  # whatever ends this thread, all waits for it have to end
            self._die(error)
        self._ending = True
        while True:
            with self._changed:
                if not self._changes:
                    self._use.note(self, stepped=False)
                    self._thread = None
                    self._ending = False
                    self._changed.notify_all()
                    return
                change = self._changes.popleft()
            self._make(change)

    def _round(self) -> bool:
        """Run one step of the session; return False when the engine is to be paused."""
        # no local name holds the session while the engine sleeps: its keys and values would not be given back
        if self._session is None:
            self._engine.wake_up()
            self._session = self._engine.open(closed=self._closed)
            self._rounds = 0
        commands = self._commands(self._session)
        self._rounds += 1
        if commands.joined:
            self._running |= {request.request_id: request for request in commands.joined}
            self._answer(self._session, self._session.add(commands.joined))
        if commands.aborted:
            self._answer(self._session, self._session.abort(commands.aborted))
        for _ in range(commands.changes):
            with self._changed:  # the other ranks may hear of it before their own change has come
                if not self._changed.wait_for(lambda: self._changes, CHANGE_SECONDS):
                    raise RolloutError(
                        f"replica {self.name}: the first rank changes its weights, and this one was not told "
                        f"to within {CHANGE_SECONDS:g} s"
                    )
                change = self._changes.popleft()
            self._make(change)
        self._ending = commands.pause is not None
        if commands.pause == "preempt" and self._session is not None:  # a change may have done it
            self._preempt()
        if commands.pause is not None:
            return False
        if self._session is None:  # a change has preempted what ran
            return True
        if not self._session.idle:
            self._answer(self._session, self._session.step())
        self._note_progress()
        self._grow(self._session)
        if self._closed and self._session.idle:
            self._ending = True
            self._leave_session()
            self._engine.sleep()
            return False
        return True

    def _commands(self, session: EngineSession) -> Commands:
        """Return new commands, and wait for them where there is nothing else to do."""
        if self._closed and self._ranks.size > 1 and self._rounds % STEPS_PER_TALK:
            return Commands()
        commands = None
        if self._ranks.rank == 0:
            with self._changed:
                if session.idle and not self._closed:
                    longest = None if self._ranks.size == 1 else IDLE_SECONDS
                    self._changed.wait_for(self._has_commands, longest)
                new: list[_Ticket] = []
                if not self._closed or self._rounds == 0:
                    new = self._inbox
                    self._inbox = []
                for ticket in new:
                    ticket.added = True
                aborted = self._aborts & (self._running.keys() | {one.request.request_id for one in new})
                self._aborts = set()
                joined = tuple(ticket.request for ticket in new)
                commands = Commands(joined, tuple(sorted(aborted)), len(self._changes), self._pause)
        return self._ranks.from_first(commands)

    def _has_commands(self) -> bool:
        return bool(self._inbox or self._aborts or self._changes or self._pause)

    def _answer(self, session: EngineSession, outputs: Iterable[GenerationOutput]) -> None:
        self._version = session.policy_version  # before its tokens are out
        for output in outputs:
            del self._running[output.request_id]
            with self._changed:
                ticket = self._tickets.get(output.request_id)
                if ticket is None or not ticket.added:  # forgotten, or the first rank's
                    continue
                del self._tickets[output.request_id]
                self._use.note(self, asked=bool(self._tickets))
            ticket.answer.set_result(output)

    def _grow(self, session: EngineSession) -> None:
        """Send new tokens to each waiting tap."""
        with self._changed:  # requests join meanwhile
            tickets = list(self._tickets.items())
        taps = {
            number: one.tap for number, one in tickets if one.tap is not None and one.tap.wants and one.added
        }
        if not taps:
            return
        for partial in session.so_far({number: one.seen for number, one in tickets if number in taps}):
            ticket = self._tickets.get(partial.request_id)
            if partial.token_ids and ticket is not None:
                ticket.seen += len(partial.token_ids)
                taps[partial.request_id].put(partial)

    def _note_progress(self) -> None:
        stats = self._engine.stats
        tokens = stats.generated_tokens + stats.prefill_tokens
        if tokens != self._tokens or not self._running:
            self._moved = time.monotonic()
        self._tokens = tokens

    def _make(self, change: _Change) -> None:
        self._use.note(self, stepped=False)
        try:
            if change.preempts and self._session is not None:
                self._preempt()
            change.work()
        except BaseException as error:  # raised where the change was asked for
            change.done.set_exception(error)
        else:
            change.done.set_result(None)
        self._use.note(self, stepped=not self.stands)
        self._moved = time.monotonic()

    def _preempt(self) -> None:
        """End the session; running requests come first in the next one, with their tokens so far."""
        assert self._session is not None, "a session that runs is preempted"
        outputs = {output.request_id: output for output in self._session.abort(list(self._running))}
        running = self._running
        self._leave_session()
        begun = []
        with self._changed:
            for number, request in running.items():
                if number in self._tickets:  # only the first rank has them, and some may be forgotten
                    ticket = self._tickets[number]
                    ticket.request = request.continued(outputs[number])
                    ticket.added = False
                    begun.append(ticket)
            self._inbox = begun + self._inbox
        self._engine.sleep()

    def _leave_session(self) -> None:
        session = self._session
        self._session = None
        self._running = {}
        if session is not None:
            self._stats.append(self._engine.stats)
            session.close()

    def _die(self, error: BaseException) -> None:
        """Fail all requests, drop the session and free the memory of the engine."""
        left = self.load
        try:
            self._leave_session()
            self._engine.sleep()
        except Exception:  # the first error says more
            logger.debug("replica %s could not be left", self.name, exc_info=True)
        failure = f"replica {self.name} died: {type(error).__name__}: {error}"
        with self._changed:
            self._failure = failure
        self.forget(failure)
        if self._ended is None:
            logger.error("%s", failure, exc_info=error)
        else:
            self._ended(error, left)
