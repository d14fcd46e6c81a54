"""Asynchronous client of one or many replicas, for what runs in an event loop: agents, groups, the server.
A caller that blocks has an event loop in a separate thread beside it (`in_own_loop`).

request ──choose (sticky key, else least loaded)──► replica.submit ──► output, perhaps after growing ones
    └── caller gives up, or the deadline passes ──► replica.abort
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput
from hybridflow.rollout.engine_replica import EngineReplica, ReplicaLost, Tap

logger = logging.getLogger(__name__)
__all__ = ["DeadlinePassed", "EngineReplica", "LLMClient", "PartialOutput", "Replica", "ReplicaLost"]

LEAST_WAIT = 0.05
"""Seconds between two checks of a replica's clock, which may be stopped just before a deadline."""
STICKY_KEYS = 65_536
"""Keys that are remembered; the least recently used one is forgotten first."""
STICKY_LEAD = 32
"""Requests that a sticky replica may have more than the least loaded one, until its queue costs too much."""
T = TypeVar("T")

LEAVE_SECONDS = 60.0
"""Longest wait for work that was cancelled."""


class DeadlinePassed(RolloutError):
    """A request had no answer in time; it was aborted."""


class Replica(Protocol):
    """One engine that serves many callers, from any thread; no method but `close` blocks."""

    name: str

    @property
    def load(self) -> int:
        """Requests without an answer."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that had no room in the engine at its last report."""
        ...

    @property
    def clock(self) -> float:
        """The clock of deadlines, in seconds; it may stop while the engine is paused."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why it serves no more requests, or None."""
        ...

    @property
    def version(self) -> int | None:
        """Version of the weights, as the engine itself says; None before it has begun."""
        ...

    def submit(self, request: GenerationRequest, tap: Tap | None = None) -> Future[GenerationOutput]: ...

    def abort(self, request_ids: Iterable[int]) -> None: ...

    def close(self, timeout_s: float = 60.0) -> None:
        """End it; requests without an answer get ReplicaLost. RolloutError where it takes longer."""
        ...


class LLMClient:
    """Sends each request to a replica and awaits its output; for one event loop and unique request ids."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        if not replicas:
            raise RolloutError("a client needs at least one replica, and got none")
        self.replicas = tuple(replicas)
        self._sticky: OrderedDict[Hashable, Replica] = OrderedDict()
        self._where: dict[int, Replica] = {}

    @property
    def failure(self) -> str | None:
        """Reason why nothing can be served: what all replicas died of; None while one is alive."""
        failures = [replica.failure for replica in self.replicas]
        return None if None in failures else "; ".join(str(failure) for failure in failures)

    @property
    def load(self) -> int:
        """Number of requests without an answer."""
        return len(self._where)

    async def generate(
        self, request: GenerationRequest, *, sticky: Hashable | None = None, deadline_s: float | None = None
    ) -> GenerationOutput:
        """Return the whole output. Requests of one `sticky` key share the prefixes of one replica.

        ReplicaLost names the engine that died under the request, DeadlinePassed the one that had no answer in
        time by the replica's clock. Cancelling the wait aborts the request.
        """
        replica = self._choose(sticky)
        answer = asyncio.wrap_future(self._submit(replica, request, None))
        ends = replica.clock + (math.inf if deadline_s is None else deadline_s)
        try:
            while not answer.done():
                left = ends - replica.clock
                if left <= 0:
                    raise _too_late(request, replica, deadline_s)
                wait = None if deadline_s is None else max(left, LEAST_WAIT)
                await asyncio.wait([answer], timeout=wait)
            return await answer
        finally:
            self._leave(replica, request, answer)

    async def stream(
        self, request: GenerationRequest, *, sticky: Hashable | None = None, deadline_s: float | None = None
    ) -> AsyncGenerator[PartialOutput | GenerationOutput, None]:
        """Yield new tokens as `PartialOutput` and at last the whole output; a slow reader gets fewer and
        longer pieces. Errors are those of `generate`.

        Close the iterator (`aclosing`) where it is left early: that aborts the request.
        """
        replica = self._choose(sticky)
        tap = _LoopTap()
        answer = asyncio.wrap_future(self._submit(replica, request, tap))
        answer.add_done_callback(lambda _: tap.arrived.set())
        ends = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        try:
            while True:
                async with asyncio.timeout_at(ends):
                    await tap.arrived.wait()
                if answer.done():
                    yield answer.result()
                    return
                yield tap.take()
        except TimeoutError as error:
            raise _too_late(request, replica, deadline_s) from error
        finally:
            self._leave(replica, request, answer)

    async def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests, unknown ones aside; their callers get the tokens so far, reason "abort"."""
        known = [one for one in request_ids if one in self._where]
        for replica in self.replicas:
            if ids := [one for one in known if self._where[one] is replica]:
                replica.abort(ids)

    async def pause(self) -> None:
        """Return when all live replicas of this process are paused between two steps; RolloutError where
        one never is.
        """
        pausing = asyncio.gather(
            *(asyncio.to_thread(replica.pause) for replica in self._here()), return_exceptions=True
        )
        try:
            results = await asyncio.shield(pausing)
        except asyncio.CancelledError:  # nothing else would resume what is paused now
            await pausing
            self.resume()
            raise
        problems = [
            one for one in results if isinstance(one, BaseException) and not isinstance(one, ReplicaLost)
        ]
        if problems:
            self.resume()
            raise problems[0]

    def resume(self) -> None:
        """Resume after `pause`, under the present weights."""
        for replica in self._here():
            with suppress(ReplicaLost):
                replica.resume()

    def _here(self) -> list[EngineReplica]:
        here = [replica for replica in self._alive() if isinstance(replica, EngineReplica)]
        if len(here) < len(self._alive()):
            raise RolloutError("engines of a run are paused by the run: only those of this process are here")
        return here

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.failure is None]

    def _choose(self, sticky: Hashable | None) -> Replica:
        alive = self._alive()
        if not alive:
            raise ReplicaLost(f"no replica is alive: {self.failure}")
        least = min(alive, key=lambda replica: replica.load)
        if sticky is None:
            return least
        known = self._sticky.get(sticky)
        if known is None or known.failure is not None or known.load > least.load + STICKY_LEAD:
            known = least
        self._sticky[sticky] = known
        self._sticky.move_to_end(sticky)
        if len(self._sticky) > STICKY_KEYS:
            self._sticky.popitem(last=False)
        return known

    def _submit(
        self, replica: Replica, request: GenerationRequest, tap: Tap | None
    ) -> Future[GenerationOutput]:
        if request.request_id in self._where:
            raise RolloutError(f"request {request.request_id} is running already: request ids must be unique")
        future = replica.submit(request, tap)
        self._where[request.request_id] = replica
        return future

    def _leave(
        self, replica: Replica, request: GenerationRequest, answer: asyncio.Future[GenerationOutput]
    ) -> None:
        del self._where[request.request_id]
        if answer.done():
            if not answer.cancelled():
                answer.exception()  # read, so that asyncio logs no unretrieved error
        else:
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            replica.abort([request.request_id])


class _LoopTap:
    """Hands growing outputs from a replica's thread to the event loop that it was made in, one at a time."""

    def __init__(self) -> None:
        self.wants = True
        self.arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._newest: PartialOutput | None = None

    def put(self, partial: PartialOutput) -> None:
        self.wants = False
        with suppress(RuntimeError):  # the loop is closed: there is no reader any longer
            self._loop.call_soon_threadsafe(self._arrive, partial)

    def _arrive(self, partial: PartialOutput) -> None:
        self._newest = partial
        self.arrived.set()

    def take(self) -> PartialOutput:
        """Return the newest piece and ask for the next one."""
        newest = self._newest
        self._newest = None
        assert newest is not None, "a tap that arrived has something"
        self.arrived.clear()
        self.wants = True
        return newest


def _too_late(request: GenerationRequest, replica: Replica, deadline_s: float | None) -> DeadlinePassed:
    return DeadlinePassed(
        f"request {request.request_id} had no answer of replica {replica.name} within {deadline_s:g} s "
        f"(deadline_s), with {replica.load} requests on that replica"
    )


@contextmanager
def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> Iterator[concurrent.futures.Future[T]]:
    """Give a future of what `work` returns or raises; where the context is left before, it is cancelled.

    Tasks that `work` leaves behind are cancelled; the context is left without those that ignore it.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]
    started = concurrent.futures.Future()

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that runs is a task's"
        started.set_result((asyncio.get_running_loop(), task))
        try:
            found = await work()
        except BaseException as error:  # raised to the caller that asks for the result
            result.set_exception(error)
        else:
            result.set_result(found)

    def run() -> None:
        coroutine = main()
        try:
            asyncio.run(coroutine)
        except BaseException as error:
            coroutine.close()
            if not result.done():
                result.set_exception(error)

    thread = threading.Thread(target=run, name="event loop of the rollout", daemon=True)
    thread.start()
    try:
        yield result
    finally:
        # a loop that could not begin has given its error as the result
        begun_or_failed: list[concurrent.futures.Future[Any]] = [started, result]
        concurrent.futures.wait(begun_or_failed, LEAVE_SECONDS, concurrent.futures.FIRST_COMPLETED)
        if started.done() and not result.done():
            loop, task = started.result()
            with suppress(RuntimeError):  # it has ended meanwhile, and its loop is closed
                loop.call_soon_threadsafe(task.cancel)
        thread.join(LEAVE_SECONDS)
        if thread.is_alive():
            logger.warning("asynchronous work has not ended %g s after it was cancelled", LEAVE_SECONDS)
