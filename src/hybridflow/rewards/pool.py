"""Scoring in processes of our own, which may be killed: a deadline for each sample, whatever the function
does.

    score(requests) ─► hand out ─► worker (pipe) ─► collect ─► past the deadline? kill, count, start anew ─►
    outcomes in order

The workers are fresh interpreters that import only this room and the reward function: they neither fork the
trainer (threads, CUDA) nor run its main module again. Each leads its own process group, so that killing it
also ends what the function started. A sync function gets one sample at a time. An async function gets
several; when such a worker dies or blocks, its samples are tried once more one by one, so that the right one
is blamed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.call import failure, timed_out
from hybridflow.rewards.request import Outcome, ScoreRequest
from hybridflow.rewards.resolve import describe
from hybridflow.rewards.worker import TICKET_BYTES

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0  # seconds a worker may take to import the reward function
ASYNC_SLOTS = 32  # async samples under way in one worker
ASYNC_GRACE = 0.5  # seconds an async worker has beyond the deadline to cancel a sample itself
MAX_IDLE_DEATHS = 10  # workers that end without having had a sample, in a row
LONGEST_WAIT = 1.0  # seconds between two looks at processes that died without closing their pipe

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hybridflow.rewards.worker import "
    "main; main(int(sys.argv[2]))"
)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    start_deadline: float
    slots: int = 0  # samples it takes at once; 0: not ready yet
    # ticket -> position in the batch, time handed out
    in_flight: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    alone: bool = False  # its one sample is a second try: give it no other

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


@dataclass
class _Batch:
    requests: Sequence[ScoreRequest]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    second_try: deque[int] = field(default_factory=deque)  # to be run with no other sample beside them

    @property
    def done(self) -> bool:
        return len(self.outcomes) == len(self.requests)


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
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)  # also when the interpreter ends
        try:
            for _ in range(config.num_workers):
                self._workers.append(self._launch())
            while not all(worker.slots for worker in self._workers):
                self._turn(_Batch([]))
            self._has_started = True
        except BaseException:
            self.close()
            raise

    def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """Score the requests; a function that fails, hangs or kills its worker gives an Outcome with an
        error.

        Raises RewardError if workers can no longer be started.
        """
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            batch = _Batch(requests, waiting=deque(range(len(requests))))
            try:
                while not batch.done:
                    self._hand_out(batch)
                    if not batch.done:
                        self._turn(batch)
            except BaseException:
                self.close()  # what is under way belongs to this batch and must not answer a later one
                raise
            return [batch.outcomes[position] for position in range(len(requests))]

    def close(self) -> None:
        """End all workers, and all processes that the reward function started in them."""
        self._closed = True
        self._finalizer()

    @property
    def process_ids(self) -> list[int]:
        """The workers' process ids, as they are now."""
        return [worker.process.pid for worker in self._workers]

    def _launch(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads},
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # it died already: found by the next look at it
            ours.send_bytes(self._setup)
        return _Worker(process, ours, time.monotonic() + self._start_timeout)

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
                if not worker.in_flight and worker.slots and worker.process.poll() is not None:
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
        ticket = self._next_ticket.to_bytes(TICKET_BYTES, "big")
        self._next_ticket += 1
        worker.in_flight[ticket] = (position, time.monotonic())
        try:
            worker.pipe.send_bytes(ticket + payload)
        except OSError:  # it died before it could see the sample, which is not to blame
            worker.in_flight.pop(ticket)
            batch.waiting.appendleft(position)
            if worker.in_flight:
                self._died(worker, batch)
            else:
                self._died_idle(worker)

    def _turn(self, batch: _Batch) -> None:
        """Wait for the next event (an answer, a death, a deadline) and deal with all that happened."""
        now = time.monotonic()
        deadlines = [self._deadline(worker) for worker in self._workers]
        pause = min([LONGEST_WAIT, *(max(0.0, deadline - now) for deadline in deadlines)])
        answered = wait([worker.pipe for worker in self._workers], pause)
        for worker in list(self._workers):
            if worker.pipe in answered:
                self._receive(worker, batch)
            elif worker.process.poll() is not None and (worker.in_flight or not worker.slots):
                self._died(worker, batch)  # something it started still holds the pipe open
            elif time.monotonic() >= self._deadline(worker):
                self._expired(worker, batch)

    def _deadline(self, worker: _Worker) -> float:
        if not worker.slots:
            return worker.start_deadline
        limit = self._config.timeout + (ASYNC_GRACE if worker.slots > 1 else 0.0)
        return min((started + limit for _, started in worker.in_flight.values()), default=float("inf"))

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        try:
            while worker.pipe.poll():
                message = pickle.loads(worker.pipe.recv_bytes())
                if not worker.slots:
                    self._started(worker, *message)
                    continue
                ticket, outcome = message
                position, _ = worker.in_flight.pop(ticket)
                worker.alone = False
                self._idle_deaths = 0
                batch.outcomes[position] = outcome
        except (EOFError, OSError):
            self._died(worker, batch)

    def _started(self, worker: _Worker, state: str, detail: Any, text: str) -> None:
        if state == "ready":
            worker.slots = ASYNC_SLOTS if detail else 1
        elif detail == ConfigError.__name__:
            raise ConfigError(text)
        else:
            raise RewardError(f"{describe(self._config)} could not be loaded by a reward worker:\n{text}")

    def _died(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.slots and not self._has_started:
            raise RewardError(
                f"a reward worker {_ending(worker.process)} while it loaded {describe(self._config)}"
            )
        if not worker.in_flight:
            self._died_idle(worker)
            return
        detail = f"the process of the reward function {_ending(worker.process)} while it scored this sample"
        self._blame(worker, batch, lambda seconds: Outcome(error="died", detail=detail, seconds=seconds))

    def _died_idle(self, worker: _Worker) -> None:
        self._idle_deaths += 1
        if self._idle_deaths > MAX_IDLE_DEATHS:
            raise RewardError(
                f"{self._idle_deaths} reward workers in a row ended before they took a sample (the last one "
                f"{_ending(worker.process)}): "
                f"look for code that ends the process in {describe(self._config)}"
            )
        self._replace(worker)

    def _expired(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.slots:
            raise RewardError(
                f"a reward worker did not finish loading {describe(self._config)} within "
                f"{self._start_timeout:g} seconds: "
                "keep the file's imports light, or load inside the function what it needs"
            )
        self._blame(worker, batch, lambda seconds: timed_out(self._config.timeout, seconds))

    def _blame(self, worker: _Worker, batch: _Batch, outcome_after: Any) -> None:
        """End the worker and start another; its sample, if it had one alone, gets the outcome, several are
        tried one by one.
        """
        self._replace(worker)
        flights = list(worker.in_flight.values())
        self._idle_deaths = 0
        if len(flights) == 1:
            position, started = flights[0]
            batch.outcomes[position] = outcome_after(time.monotonic() - started)
        else:
            batch.second_try.extend(position for position, _ in flights)


def _ending(process: subprocess.Popen[bytes]) -> str:
    """How the process ended, as the end of a sentence."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()
    workers.clear()
