"""HTTP calls that run concurrently on an event loop in a thread; their results come as they finish."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

POLL_S = 0.05
"""Seconds that `wait` waits at most."""


class Calls(Generic[T]):
    """Named jobs on one client, at most `max_concurrent` at a time; for one thread that adds and waits, and
    `cancel` for any.
    """

    def __init__(self, connect: Callable[[], httpx.AsyncClient], max_concurrent: int) -> None:
        self._client = connect()
        self._turn = asyncio.Semaphore(max_concurrent)
        self._done: queue.SimpleQueue[tuple[int, Future[T]]] = queue.SimpleQueue()
        self._open: dict[int, Future[T]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Number of jobs that have given no result and were not cancelled."""
        return len(self._open)

    def add(self, name: int, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> None:
        """Begin a job; a name may come again when its job is no longer open."""
        future = self._open[name] = asyncio.run_coroutine_threadsafe(self._run(work), self._loop)
        future.add_done_callback(lambda ended: self._done.put((name, ended)))

    def wait(self) -> list[T]:
        """Wait a little for jobs to end, and return the results that are there; raises what a job raised."""
        try:
            found = [self._done.get(timeout=POLL_S)]
        except queue.Empty:  # the caller may have something to add or to cancel
            return []
        found += [self._done.get() for _ in range(self._done.qsize())]
        results: list[T] = []
        for name, future in found:
            if self._open.get(name) is future:  # and was not cancelled
                del self._open[name]
                results.append(future.result())
        return results

    def cancel(self, names: set[int]) -> list[int]:
        """Cancel these jobs; returns those that had given no result."""
        ended = []
        for name in sorted(names):
            future = self._open.pop(name, None)
            if future is not None:
                future.cancel()
                ended.append(name)
        return ended

    def stop(self) -> None:
        """End all jobs and the thread."""
        self.cancel(set(self._open))
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        async with self._turn:
            return await work(self._client)

    async def _close(self) -> None:
        """Wait until the cancelled jobs have ended, and close the client."""
        jobs = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._client.aclose()
