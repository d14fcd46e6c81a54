"""The watchdog over remote calls: a thread that tracks results and heartbeats, logs slow calls, and fails
calls that hang.

    answers of ranks ──────────┐                     ┌─► parts are done, or failed with the first failure
    pings, every few seconds ──┼─► Running, Process ─┤
    the clock ─────────────────┘                     └─► log lines with a stack, deadlines, WorkerLost

After a rank hung or a process was lost the backend is broken: the failure is kept and raised by each later
call.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from hybridflow.controller.ray.preflight import answers
from hybridflow.controller.ray.running import Failure, Process, Running, cause_of, lost
from hybridflow.controller.ray.transport import StoredPacket
from hybridflow.errors import WorkerError, WorkerLost

logger = logging.getLogger(__name__)

STACK_SECONDS = 2.0
START_SECONDS = 5.0
"""Seconds until the log first counts the processes that have started; the time doubles with each line."""
TICK_SECONDS = 0.2


class Watchdog:
    """A thread that watches the processes of a backend and the calls that run in them.

    `report_every` is the number of seconds between log lines about a call.
    """

    def __init__(
        self, processes: Sequence[Process], heartbeat_timeout: float, *, report_every: float = 60.0
    ) -> None:
        self._processes = processes
        self._heartbeat_timeout = heartbeat_timeout
        self._report_every = report_every
        self._grace = min(15.0, heartbeat_timeout / 2)  # for the other ranks, once one has failed
        self._ping_every = min(2.0, heartbeat_timeout / 4)
        self._running: list[Running] = []
        self._broken: Exception | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._hearts_from: float | None = None
        self._next_pings = 0.0
        self._thread = threading.Thread(target=self._watch, name="hybridflow-watch", daemon=True)
        self._thread.start()

    # ---- called by the backend

    def follow(self, running: Running, statuses: dict[int, ray.ObjectRef[Any]]) -> None:
        """Follow a call whose ranks answer through `statuses`."""
        with self._lock:
            self._running.append(running)
        for rank, status in statuses.items():
            status.future().add_done_callback(partial(self._answered, running, rank))

    def check(self, what: str) -> None:
        """Raise the failure that broke the backend, if there is one."""
        if self._broken is not None:
            self._broken.add_note(f"{what} was not called after that")
            raise self._broken

    def expect_signs(self) -> None:
        """Count a process as lost from now on when it gives no sign of life; before, it may be importing and
        loading.
        """
        now = time.monotonic()
        for process in self._processes:
            process.last_sign = now
        self._hearts_from = now

    @property
    def idle(self) -> bool:
        """True where no call runs and nothing is broken."""
        with self._lock:
            return not self._running and self._broken is None

    def stop(self, error: Exception) -> None:
        """End the thread, and fail all calls that still run with `error`."""
        self._stopped.set()
        with self._lock:
            left = self._running
            self._running = []
            self._broken = self._broken or error
            for running in left:
                running.waiting.clear()
        for running in left:
            running.end(error)

    # ---- called with the ranks' answers, in threads of Ray

    def _answered(
        self, running: Running, rank: int, status: concurrent.futures.Future[Failure | StoredPacket | None]
    ) -> None:
        error = status.exception()
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            process = running.waiting.get(rank)
            if process is None:
                return
            if isinstance(error, ActorUnavailableError):
                process.cut_off = True  # the clock finds out why, since this thread of Ray's must not wait
            else:
                self._lose(process, cause_of(error))
            return
        with self._lock:
            process = running.waiting.get(rank)
            if process is None:
                return
            process.last_sign = time.monotonic()
            said = None if error is not None else status.result()
            failure = said if isinstance(said, Failure) else None
            if isinstance(said, StoredPacket):
                running.parts[rank].is_held(said)
            if error is not None:
                running.fail(
                    rank,
                    WorkerError(f"{running} on rank {rank}: {error}", role=running.role, rank=rank),
                    time.time(),
                )
            elif failure is not None:
                found = failure.exception(running.role, running.method, rank)
                if isinstance(found, WorkerLost):  # it read what a process that ended before had made
                    found = self._broken or found
                running.fail(rank, found, failure.at)
            else:
                del running.waiting[rank]
            over = not running.waiting
            if over and running in self._running:
                self._running.remove(running)
        if error is None and failure is None:
            running.parts[rank].settle()
        if over and running.errors:
            running.end(running.first_error())

    def _lose(self, process: Process, cause: str) -> None:
        """Fail every call that waits for a process that is gone."""
        with self._lock:
            if process.ended:
                return
            process.ended = True
            logger.error("%s", lost(cause, process.place, process.pid))
            over = []
            for running in list(self._running):
                for rank in [rank for rank, where in running.waiting.items() if where is process]:
                    error = lost(
                        cause, process.place, process.pid, role=running.role, method=running.method, rank=rank
                    )
                    running.fail(rank, error, 0.0)
                    self._broken = self._broken or error
                if not running.waiting:
                    self._running.remove(running)
                    over.append(running)
            self._broken = self._broken or lost(cause, process.place, process.pid)
        for running in over:
            running.end(running.first_error())

    # ---- called by the clock

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(TICK_SECONDS):
            now = time.monotonic()
            # this process itself stood still (a debugger, a suspended machine)
            if now - before > 2.0 + STACK_SECONDS:
                for process in self._processes:
                    process.last_sign = now
            before = now
            try:
                self._tick(now)
            except Exception as error:  # without this thread calls could hang, so all of them end
                logger.exception("the thread that watches the workers failed")
                self.stop(error)

    def _tick(self, now: float) -> None:
        for process in self._processes:
            if process.cut_off and not process.ended:
                self._lose(process, self._cut_off(process))
        if self._hearts_from is not None:
            self._hearts(now)
        with self._lock:
            running = list(self._running)
        for call in running:
            if call.failed_at is not None:
                if now - call.failed_at > self._grace:
                    self._end_hanging(call)
            elif now - call.started > call.limit:
                self._end_late(call)
            elif now - call.started > self._next_report(call):
                call.reported += 1
                self._report(call, now)

    def _hearts(self, now: float) -> None:
        if now >= self._next_pings:
            self._next_pings = now + self._ping_every
            for process in self._processes:
                self._ping(process)
        for process in self._processes:
            silent = now - process.last_sign
            if silent > self._heartbeat_timeout and not process.ended:
                self._lose(process, self._silence(process, silent))

    def _cut_off(self, process: Process) -> str:
        if not node_answers(process.node_id):
            return "its node is gone: the connection to it broke, and nothing answers there any more"
        return (
            "the connection to it broke while its node still answers: its process has died, or its "
            "network is failing"
        )

    def _silence(self, process: Process, seconds: float) -> str:
        if not node_answers(process.node_id):
            return (
                f"its node is gone: it has not answered for {seconds:.0f} s, and nothing answers there "
                "any more"
            )
        return (
            f"no sign of life for {seconds:.0f} s: its node is gone or cut off, or code in it holds Python's "
            "lock for too long (trainer.heartbeat_timeout)"
        )

    def _ping(self, process: Process) -> None:
        if process.pinged or process.ended:
            return
        process.pinged = True

        def answered(ping: concurrent.futures.Future[None]) -> None:
            error = ping.exception()
            process.pinged = False
            if error is None:
                process.last_sign = time.monotonic()
            elif not isinstance(error, ActorUnavailableError):  # it may come back: the clock decides
                self._lose(process, cause_of(error))

        process.actor.ping.remote().future().add_done_callback(answered)

    def _next_report(self, call: Running) -> float:
        """Return the seconds from a call's start to the next log line about it."""
        if call.starting:
            return START_SECONDS * 2.0**call.reported
        return self._report_every * (call.reported + 1)

    def _report(self, call: Running, now: float) -> None:
        ranks = sorted(call.waiting)
        if call.starting:
            self._report_start(call, now - call.started)
        elif ranks:
            stack = (
                self._stack(call, ranks[0])
                or f"rank {ranks[0]} ({call.waiting.get(ranks[0])}) does not answer"
            )
            logger.warning(
                "%s has been running for %.0f s on ranks %s; %s", call, now - call.started, ranks, stack
            )

    def _report_start(self, call: Running, seconds: float) -> None:
        """Log how many processes have started; warn only after half of the time that they may take."""
        missing = [str(process) for process in list(call.waiting.values())]
        here = f"{call.starting}: {len(call.parts) - len(missing)} have started after {seconds:.0f} s"
        if missing and seconds > call.limit / 2:
            logger.warning(
                "%s, but not %s; the run gives up after %.0f s (%s)",
                here,
                ", ".join(missing),
                call.limit,
                call.limit_key,
            )
        elif missing:
            logger.info("%s", here)

    def _end_late(self, call: Running) -> None:
        ranks = sorted(call.waiting)
        if not ranks:
            return
        what = call.starting or str(call)
        kind = WorkerLost if call.limit_key == "trainer.worker_timeout" else WorkerError
        error = kind(
            f"{what} has not finished after {call.limit:.0f} s on ranks {ranks}: it hangs, or "
            f"{call.limit_key} is too short for it",
            role=call.role,
            rank=ranks[0],
            method=call.method,
        )
        if stack := self._stack(call, ranks[0]):
            error.add_note(stack)
        # one that is late at the same time may only have waited for the result of the first
        self._break(call, lambda: self._broken or error)

    def _end_hanging(self, call: Running) -> None:
        """End a call in which one rank has failed and others do not answer.

        Those are lost as well, and their loss is then the cause, or they wait in a collective for ever.
        """
        silent = {rank: self._stack(call, rank) for rank in sorted(call.waiting)}
        for rank, stack in silent.items():
            process = call.waiting.get(rank)
            if process is not None and not stack and process.last_sign < (call.failed_at or 0.0):
                self._lose(process, self._silence(process, time.monotonic() - process.last_sign))
            elif process is not None:
                logger.warning(
                    "%s failed on ranks %s and hangs on rank %d; %s", call, sorted(call.errors), rank, stack
                )
        self._break(call, call.first_error)

    def _break(self, call: Running, error: Callable[[], Exception]) -> None:
        """End a call that hangs, and the processes that still run it."""
        with self._lock:
            if call not in self._running:
                return
            self._running.remove(call)
            found = error()
            self._broken = self._broken or found
            hanging = list(call.waiting.values())
            call.waiting.clear()
            for process in hanging:
                process.ended = True
        for process in hanging:
            ray.kill(process.actor)
        call.end(found)

    def _stack(self, call: Running, rank: int) -> str:
        """Return the stack of a rank, or an empty text where it does not answer in time."""
        process = call.waiting.get(rank)
        if process is None or process.ended:
            return ""
        try:
            return (
                f"rank {rank} ({process}) is here:\n"
                f"{ray.get(process.actor.stacks.remote(), timeout=STACK_SECONDS)}"
            )
        except (RayError, TimeoutError):
            return ""


def node_answers(node_id: str) -> bool:
    """Return whether a node is alive to Ray and its Ray accepts connections.

    Ray alone notices the loss of a node only after some seconds.
    """
    found = [node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]]
    return any(answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") for node in found)
