"""Scoring in processes that may be killed: a deadline for each sample, whatever the function does.

    add(request) ─► hand out ─► worker (socket) ─► collect ─► past the deadline? kill, count, start anew
                                                              ─► outcomes in the order of the requests

A thread does this from `open` to the last outcome, so that requests may come while others are being scored.

The workers are fresh interpreters that import only this room and the reward function. Each has a keeper
(`processes/keeper.py`) as its parent, so that ending it also ends every process that the function started.
A sync function gets one sample at a time. An async function gets several; when such a worker dies or blocks,
the samples that it had begun are tried once more one by one, so that the right one is blamed.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.processes.channel import Channel, ChannelBroken
from hybridflow.processes.worker_process import START_TIMEOUT, WorkerProcess, kill_all
from hybridflow.rewards.answers import decode, outcome_of
from hybridflow.rewards.call import failure, timed_out
from hybridflow.rewards.request import OpenScoring, Outcome, ScoreRequest
from hybridflow.rewards.resolve import describe
from hybridflow.rewards.worker import TICKET_BYTES

logger = logging.getLogger(__name__)

ASYNC_SLOTS = 32
"""Async samples under way in one worker."""
ASYNC_GRACE = 0.5
"""Seconds beyond the deadline that an async worker has to cancel a sample itself."""
MAX_IDLE_DEATHS = 10
"""Workers in a row that may end without having begun a sample."""
LONGEST_WAIT = 1.0
"""Seconds between two looks at processes that died without closing their socket."""
OPEN_WAIT = 0.05
"""Seconds between two looks at the requests, while more of them may come."""


@dataclass
class _Flight:
    """One sample that was given to a worker."""

    position: int  # in the batch
    started: float  # when it was handed out, by the monotonic clock
    taken: bool = False  # the worker has begun to score it


class _Worker(WorkerProcess):
    """A process that scores, and the samples that it has."""

    def __init__(self, start_timeout: float) -> None:
        super().__init__("hybridflow.rewards.worker")
        self.channel = Channel(self.socket)
        self.start_deadline = time.monotonic() + start_timeout
        self.slots = 0  # samples it takes at once; 0: not ready yet
        self.process_id = 0  # of the worker itself; 0: not ready yet
        self.in_flight: dict[int, _Flight] = {}  # by ticket
        self.alone = False  # its one sample is a second try: give it no other

    def kill(self) -> None:
        """End the worker and every process below its keeper, and close its socket."""
        super().kill()
        self.socket.close()


@dataclass
class _Batch:
    requests: list[ScoreRequest] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    second_try: deque[int] = field(default_factory=deque)  # to be run with no other sample beside them
    complete: bool = False  # no more requests come
    abandoned: bool = False  # nobody waits for the outcomes

    @property
    def done(self) -> bool:
        return self.complete and len(self.outcomes) == len(self.requests)


class RewardPool:
    """`reward.num_workers` processes that score; results come in the order of the requests.

    Raises ConfigError or RewardError at construction if the workers cannot load the reward function.
    """

    def __init__(self, config: RewardConfig, seed: int, *, start_timeout: float = START_TIMEOUT) -> None:
        assert config.num_workers > 0, "a pool needs workers; InProcessScorer scores without"
        self._config = config
        self._setup = pickle.dumps((config, seed))
        self._start_timeout = start_timeout
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._next_ticket = 0
        self._idle_deaths = 0
        self._closed = False
        # once it has, a worker that dies while it loads is a chance event, and replaced like others
        self._has_started = False
        self._finalizer = weakref.finalize(self, kill_all, self._workers)  # also when the interpreter ends
        try:
            for _ in range(config.num_workers):
                self._workers.append(self._launch())
            while not all(worker.slots for worker in self._workers):
                self._turn(_Batch())
            self._has_started = True
        except BaseException:
            self.close()
            raise

    def open(self) -> OpenScoring:
        """Begin to score requests that come one by one; several that are open take their turns.

        A function that fails, hangs or kills its worker gives an Outcome with an error. `outcomes` raises
        RewardError if workers can no longer be started.
        """
        return _PoolScoring(self._run)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """Score requests that are all there."""
        scoring = self.open()
        try:
            for request in requests:
                scoring.add(request)
            return scoring.outcomes()
        finally:
            scoring.close()

    def _run(self, batch: _Batch) -> None:
        """Score the requests of a batch until it is done."""
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            try:
                while not batch.done:
                    if batch.abandoned:
                        raise RewardError("the rewards under way were given up")
                    self._hand_out(batch)
                    if not batch.done:
                        self._turn(batch)
            except BaseException:
                self.close()  # what is under way belongs to this batch and must not answer a later one
                raise

    def close(self) -> None:
        """End all workers, and all processes that the reward function started in them."""
        self._closed = True
        self._finalizer()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the workers that are ready."""
        return [worker.process_id for worker in self._workers if worker.slots]

    def _launch(self) -> _Worker:
        worker = _Worker(self._start_timeout)
        with contextlib.suppress(OSError):  # it died already: found by the next look at it
            worker.channel.send(self._setup)
        return worker

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        if self._closed:
            raise RewardError("the reward pool was closed while it was scoring")
        self._workers[self._workers.index(worker)] = self._launch()

    def _hand_out(self, batch: _Batch) -> None:
        given = True
        while given and (batch.waiting or batch.second_try):
            given = False
            # one each in turn, so that async samples spread over the workers
            for worker in list(self._workers):
                if not worker.in_flight and worker.slots and worker.has_ended():
                    self._died_idle(worker)
                elif batch.second_try and worker.slots and not worker.in_flight:
                    worker.alone = True
                    self._send(worker, batch, batch.second_try.popleft())
                    given = True
                elif batch.waiting and not worker.alone and len(worker.in_flight) < worker.slots:
                    self._send(worker, batch, batch.waiting.popleft())
                    given = True

    def _send(self, worker: _Worker, batch: _Batch, position: int) -> None:
        try:
            payload = pickle.dumps(batch.requests[position])
        except Exception as error:  # whatever the rows of a dataset hold: not ours to know
            batch.outcomes[position] = failure(error, 0.0)
            worker.alone = False
            return
        ticket = self._next_ticket
        self._next_ticket += 1
        worker.in_flight[ticket] = _Flight(position, time.monotonic())
        with contextlib.suppress(OSError):  # it is gone, which the next look at it tells
            worker.channel.send(ticket.to_bytes(TICKET_BYTES, "big") + payload)

    def _turn(self, batch: _Batch) -> None:
        """Wait for the next event (an answer, a death, a deadline) and deal with all that happened."""
        now = time.monotonic()
        deadlines = [self._deadline(worker) for worker in self._workers]
        longest = LONGEST_WAIT
        if self._has_started and not batch.complete:
            longest = OPEN_WAIT
        pause = min([longest, *(max(0.0, deadline - now) for deadline in deadlines)])
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                events = selectors.EVENT_READ
                if worker.channel.unsent:
                    events |= selectors.EVENT_WRITE
                selector.register(worker.channel, events, worker)
            ready = {id(each.data): events for each, events in selector.select(pause)}
        for worker in list(self._workers):
            events = ready.get(id(worker), 0)
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):  # the next read tells how it ended
                    worker.channel.flush()
            if events & selectors.EVENT_READ:
                self._receive(worker, batch)
            elif worker.has_ended() and (worker.in_flight or not worker.slots):
                self._died(worker, batch)  # something it started still holds the socket open
            elif time.monotonic() >= self._deadline(worker):
                self._expired(worker, batch)

    def _deadline(self, worker: _Worker) -> float:
        if not worker.slots:
            return worker.start_deadline
        limit = self._config.timeout
        if worker.slots > 1:
            limit += ASYNC_GRACE
        started = [flight.started for flight in worker.in_flight.values()]
        return min(started, default=float("inf")) + limit

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        try:
            messages, closed = worker.channel.receive()
            for message in messages:
                self._read(worker, batch, decode(message))
        except OSError:
            closed = True
        except (ChannelBroken, ValueError, KeyError, TypeError) as error:
            self._spoilt(worker, batch, error)
            return
        if closed:
            self._died(worker, batch)

    def _read(self, worker: _Worker, batch: _Batch, message: dict[str, Any]) -> None:
        """Act on one message of a worker. Raises ValueError, KeyError or TypeError if it is no answer."""
        state = message["state"]
        if not worker.slots:
            self._started(worker, message)
        elif state == "taken":
            worker.in_flight[message["ticket"]].taken = True
        elif state == "scored":
            outcome = outcome_of(message)
            position = worker.in_flight.pop(message["ticket"]).position
            worker.alone = False
            self._idle_deaths = 0
            batch.outcomes[position] = outcome
        else:
            raise ValueError(f"a message with the state {state!r}")

    def _started(self, worker: _Worker, message: dict[str, Any]) -> None:
        if message["state"] == "ready":
            worker.slots = 1
            if message["is_async"]:
                worker.slots = ASYNC_SLOTS
            worker.process_id = message["process_id"]
        elif message["error"] == ConfigError.__name__:
            raise ConfigError(message["detail"])
        else:
            raise RewardError(
                f"{describe(self._config)} could not be loaded by a reward worker:\n{message['detail']}"
            )

    def _died(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.slots and not self._has_started:
            raise RewardError(f"a reward worker {worker.ending()} while it loaded {describe(self._config)}")
        # samples that the worker had not begun are not to blame
        untaken = [ticket for ticket, flight in worker.in_flight.items() if not flight.taken]
        batch.waiting.extendleft(worker.in_flight.pop(ticket).position for ticket in reversed(untaken))
        if not worker.in_flight:
            self._died_idle(worker)
            return
        detail = f"the process of the reward function {worker.ending()} while it scored this sample"
        self._blame(worker, batch, lambda seconds: Outcome(error="died", detail=detail, seconds=seconds))

    def _spoilt(self, worker: _Worker, batch: _Batch, error: Exception) -> None:
        """End a worker that sent bytes which are no answer, as one that died."""
        what = (
            "wrote bytes of its own into the socket of its process, which only the library writes to "
            f"({error})"
        )
        if not worker.in_flight:
            if not worker.slots and not self._has_started:
                raise RewardError(f"{describe(self._config)} {what} while it was loaded")
            logger.warning("%s %s; its process is replaced", describe(self._config), what)
            self._died_idle(worker)
            return
        detail = f"the reward function {what}"
        self._blame(worker, batch, lambda seconds: Outcome(error="died", detail=detail, seconds=seconds))

    def _died_idle(self, worker: _Worker) -> None:
        self._idle_deaths += 1
        if self._idle_deaths > MAX_IDLE_DEATHS:
            raise RewardError(
                f"{self._idle_deaths} reward workers in a row ended before they began a sample (the last one "
                f"{worker.ending()}): look for code that ends the process in {describe(self._config)}"
            )
        self._replace(worker)

    def _expired(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.slots:
            raise RewardError(
                f"a reward worker did not finish loading {describe(self._config)} within "
                f"{self._start_timeout:g} seconds: keep the file's imports light, or load inside the "
                "function what it needs"
            )
        self._blame(worker, batch, lambda seconds: timed_out(self._config.timeout, seconds))

    def _blame(self, worker: _Worker, batch: _Batch, outcome_after: Callable[[float], Outcome]) -> None:
        """End the worker and start another.

        Its sample, if it had one alone, gets the outcome; several are tried again one by one.
        """
        self._replace(worker)
        flights = list(worker.in_flight.values())
        self._idle_deaths = 0
        if len(flights) == 1:
            flight = flights[0]
            batch.outcomes[flight.position] = outcome_after(time.monotonic() - flight.started)
        else:
            batch.second_try.extend(flight.position for flight in flights)


class _PoolScoring:
    """Requests under way in a pool, and the thread that sees to them."""

    def __init__(self, run: Callable[[_Batch], None]) -> None:
        self._batch = _Batch()
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._see_to_it, name="rewards", daemon=True)
        self._thread.start()

    def add(self, request: ScoreRequest) -> None:
        batch = self._batch
        batch.requests.append(request)
        batch.waiting.append(len(batch.requests) - 1)

    def outcomes(self) -> list[Outcome]:
        self._batch.complete = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        return [self._batch.outcomes[position] for position in range(len(self._batch.requests))]

    def close(self) -> None:
        self._batch.abandoned = True
        self._thread.join()

    def _see_to_it(self) -> None:
        try:
            self._run(self._batch)
        except BaseException as error:  # raised where the outcomes are waited for
            self._error = error
