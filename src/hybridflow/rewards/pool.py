"""Scoring in processes that can be killed: a deadline for each sample, whatever the function does.

    add(request) ─► a free worker (processes/hosts.py) ─► outcome      past the deadline: killed, counted

An event loop in its own thread does this from the pool's start to its end, so that requests may come
while others are being scored. A sync function gets one sample at a time. An async function gets several; when
such a worker dies or blocks, the samples that it had begun are tried once more one by one, so that the right
one is blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import ConfigError, HybridFlowError, RewardError
from hybridflow.processes.channel import dumps
from hybridflow.processes.errors import CallFailed, CallRaised, CallTooLong, ProcessLost
from hybridflow.processes.hosts import START_TIMEOUT, Hosted, Hosts
from hybridflow.rewards.call import Mode, failure
from hybridflow.rewards.compose import describe
from hybridflow.rewards.load import JudgeAccess
from hybridflow.rewards.result import OpenScoring, ScoreRequest, ScoringOutcome

UNLIMITED = 1 << 30


class RateLimit:
    """Lets requests through in the order in which they come, evenly spaced so that no minute has too many.

    A request counts as `reward.estimated_tokens_per_request` tokens.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        requests_s = 60.0 / (config.max_rpm or float("inf"))
        tokens_s = 60.0 * config.estimated_tokens_per_request / (config.max_tpm or float("inf"))
        self._spacing_s = max(requests_s, tokens_s)
        self._places = asyncio.Semaphore(config.max_concurrent or UNLIMITED)
        self._turn = asyncio.Lock()
        self._next = now()
        self._now = now
        self._sleep = sleep

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait until a request may be made; it holds one of the places for those at once until the end."""
        async with self._places:
            async with self._turn:
                wait = self._next - self._now()
                if wait > 0:
                    await self._sleep(wait)
                self._next = max(self._next, self._now()) + self._spacing_s
            yield


ASYNC_SLOTS = 32
"""Async samples running in one worker."""
ASYNC_GRACE = 0.5
"""Seconds beyond the deadline that an async worker has to cancel a sample itself."""
LONGEST_PAUSE = 60.0
"""Seconds, more or less, before a further try, which are 1, 2, 4, … otherwise."""


@dataclass
class _Flight:
    """A sample of an async function, and where its outcome goes."""

    payload: bytes
    outcome: asyncio.Future[ScoringOutcome]
    started: float = field(default_factory=time.monotonic)

    def settle(self, outcome: ScoringOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class RewardPool:
    """`reward.num_workers` processes that score; results come in the order of the requests.

    Raises ConfigError or RewardError at construction if the workers cannot load the reward function.
    """

    def __init__(
        self,
        config: RewardConfig,
        seed: int,
        judge: JudgeAccess | None = None,
        *,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        assert config.num_workers > 0, "a pool needs workers; InProcessScorer scores without"
        self._timeout = config.timeout
        self._function = describe(config)
        self._start_timeout = start_timeout
        # each has one worker: a poll must reach the process that runs the samples
        self._hosts = [Hosts(1, start_timeout=start_timeout) for _ in range(config.num_workers)]
        self._limit = RateLimit(config)
        self._max_retries = config.max_retries
        self._jitter = random.Random(seed)
        self._free: asyncio.Queue[Hosted] = asyncio.Queue()
        self._waiting: asyncio.Queue[_Flight] = asyncio.Queue()
        self._mode: Mode = "sync"
        self._closed = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        try:
            self._submit(self._start(pickle.dumps((config, seed, judge)))).result()
        except BaseException:
            self.close()
            raise

    def open(self) -> OpenScoring:
        """Open a session for requests that come one by one; several may be open at once.

        A function that fails, hangs or kills its worker gives an Outcome with an error.
        """
        return _PoolScoring(self)

    @property
    def takes_all(self) -> bool:
        """Whether a manager scores all requests in one call."""
        return self._mode == "batch"

    def submit(self, requests: Sequence[ScoreRequest]) -> futures.Future[list[ScoringOutcome]]:
        """Submit a request, or all where a manager scores; cancelling the future ends its scoring."""
        return self._submit(self._score(requests))

    def close(self) -> None:
        """End all workers, and all processes that the reward function started in them."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        for hosts in self._hosts:
            hosts.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _submit(self, work: Coroutine[Any, Any, Any]) -> futures.Future[Any]:
        if self._closed:
            work.close()
            raise RewardError("the reward pool is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self, setup: bytes) -> None:
        """Load the function in every worker."""
        factory = "hybridflow.rewards.call:load"
        deadline_s = self._start_timeout
        try:
            workers = await asyncio.gather(
                *(hosts.create(factory, setup, deadline_s=deadline_s) for hosts in self._hosts)
            )
            self._mode = await workers[0].call("mode", deadline_s=deadline_s)
        except CallFailed as error:
            raise self._refusal(error) from error
        for worker in workers:
            worker.kind = self._function
            if self._mode == "async":
                asyncio.create_task(self._serve(worker))  # noqa: RUF006 - `close` finds and ends it
            else:
                self._free.put_nowait(worker)

    def _refusal(self, error: CallFailed) -> HybridFlowError:
        if isinstance(error, CallTooLong):
            return RewardError(
                f"a reward worker did not finish loading {self._function} within {self._start_timeout:g} "
                "seconds: keep the file's imports light, or load inside the function what it needs"
            )
        if not isinstance(error, CallRaised):
            return RewardError(f"a reward worker ended while it loaded {self._function}: {error}")
        if error.type_name == ConfigError.__name__:
            return ConfigError(error.message)
        return RewardError(
            f"{self._function} could not be loaded by a reward worker:\n{error.traceback_text}"
        )

    async def _score(self, requests: Sequence[ScoreRequest]) -> list[ScoringOutcome]:
        """Score those of the requests that can be sent; the others are errors of their rows."""
        payloads: list[bytes | ScoringOutcome] = []
        for request in requests:
            try:
                payloads.append(dumps(request))
            except Exception as error:  # whatever the rows of a dataset hold: not ours to know
                payloads.append(failure(error, 0.0))
        sent = [payload for payload in payloads if isinstance(payload, bytes)]
        scored = iter(await self._tried(sent) if sent else ())
        return [payload if isinstance(payload, ScoringOutcome) else next(scored) for payload in payloads]

    async def _tried(self, payloads: Sequence[bytes]) -> list[ScoringOutcome]:
        """Score requests, and try again for as often as may be where that fails."""
        number = 0
        while True:
            async with self._limit.admitted():
                outcomes = await self._try(payloads)
            number += 1
            if number > self._max_retries or not any(outcome.error for outcome in outcomes):
                return [replace(outcome, tries=number) for outcome in outcomes]
            pause = min(LONGEST_PAUSE, 2.0 ** (number - 1))
            await asyncio.sleep(pause * self._jitter.uniform(0.5, 1.5))

    async def _try(self, payloads: Sequence[bytes]) -> list[ScoringOutcome]:
        if self._mode == "async":
            (payload,) = payloads
            flight = _Flight(payload, asyncio.get_running_loop().create_future())
            self._waiting.put_nowait(flight)
            return [await flight.outcome]
        worker = await self._free.get()
        try:
            return await self._alone(worker, payloads)
        finally:
            self._free.put_nowait(worker)

    async def _alone(self, worker: Hosted, payloads: Sequence[bytes]) -> list[ScoringOutcome]:
        """Score one sample in a worker, or those of a manager; any failure is attributed to them."""
        started = time.monotonic()
        deadline_s = self._timeout
        if self._mode == "async":
            deadline_s += ASYNC_GRACE
        try:
            outcomes: list[ScoringOutcome] = await worker.call("score", payloads, deadline_s=deadline_s)
        except CallFailed as error:
            return [self._blamed(error, time.monotonic() - started)] * len(payloads)
        except Exception as error:  # all together are too large
            return [failure(error, 0.0)] * len(payloads)
        return outcomes

    def _blamed(self, error: CallFailed, seconds: float) -> ScoringOutcome:
        if isinstance(error, CallTooLong):
            detail = f"{error} (reward.timeout={self._timeout:g} seconds)"
            return ScoringOutcome(error="timeout", detail=detail, seconds=seconds)
        if isinstance(error, ProcessLost):
            return ScoringOutcome(error="died", detail=str(error), seconds=seconds)
        assert isinstance(error, CallRaised)
        return ScoringOutcome(error=error.type_name, detail=error.traceback_text, seconds=seconds)

    async def _serve(self, worker: Hosted) -> None:
        """Keep up to ASYNC_SLOTS samples running in a worker."""
        tickets = itertools.count()
        flights: dict[int, _Flight] = {}
        while True:
            flights = {ticket: flight for ticket, flight in flights.items() if not flight.outcome.done()}
            taken = await self._take(ASYNC_SLOTS - len(flights), wait=not flights)
            joining = {next(tickets): flight for flight in taken}
            flights |= joining
            if not flights:
                continue
            new = {ticket: flight.payload for ticket, flight in joining.items()}
            deadline_s = self._timeout + ASYNC_GRACE
            try:
                outcomes = await worker.call("poll", new, list(flights), deadline_s=deadline_s)
            except CallFailed as error:
                await self._find_out(worker, list(flights.values()), error)
                continue
            for ticket, outcome in outcomes.items():
                flights.pop(ticket).settle(outcome)

    async def _take(self, room: int, *, wait: bool) -> list[_Flight]:
        """Return samples for one worker; those that wait are shared among the workers."""
        taken: list[_Flight] = []
        if wait:
            taken.append(await self._waiting.get())
        share = 1 + self._waiting.qsize() // len(self._hosts)
        while len(taken) < min(room, share) and not self._waiting.empty():
            taken.append(self._waiting.get_nowait())
        return [flight for flight in taken if not flight.outcome.done()]

    async def _find_out(self, worker: Hosted, flights: Sequence[_Flight], error: CallFailed) -> None:
        """Settle samples whose worker was lost: a single one is the cause, several are retried one by one."""
        if len(flights) == 1 and not isinstance(error, CallRaised):
            flights[0].settle(self._blamed(error, time.monotonic() - flights[0].started))
            return
        for flight in flights:
            (outcome,) = await self._alone(worker, [flight.payload])
            flight.settle(outcome)


class _PoolScoring:
    """Running requests of a pool."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._futures: list[futures.Future[list[ScoringOutcome]]] = []
        self._collected: list[ScoreRequest] = []

    def add(self, request: ScoreRequest) -> None:
        if self._pool.takes_all:
            self._collected.append(request)
        else:
            self._futures.append(self._pool.submit([request]))

    def outcomes(self) -> list[ScoringOutcome]:
        if self._collected:
            self._futures.append(self._pool.submit(self._collected))
            self._collected = []
        try:
            return [outcome for future in self._futures for outcome in future.result()]
        except futures.CancelledError as error:
            raise RewardError("the reward pool was closed while it was scoring") from error

    def close(self) -> None:
        for future in self._futures:
            future.cancel()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
