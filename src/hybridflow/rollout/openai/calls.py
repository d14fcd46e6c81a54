"""HTTP calls that run concurrently on an event loop in a thread; their results come as they finish."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

POLL_S = 0.05
"""Seconds that `wait` waits at most."""


@dataclass(eq=False)
class _Job(Generic[T]):
    name: int
    work: Callable[[httpx.AsyncClient], Awaitable[T]]
    task: asyncio.Task[T] | None = None
    cancelled: bool = False
    """Whether it was cancelled before it had a task."""


class Calls(Generic[T]):
    """Named jobs on one client, at most `max_concurrent` at a time; for one thread that adds and waits, and
    `cancel` for any.
    """

    def __init__(self, connect: Callable[[], httpx.AsyncClient], max_concurrent: int) -> None:
        self._connect = connect
        self._max_concurrent = max_concurrent
        self._inbox: asyncio.Queue[_Job[T] | None] = asyncio.Queue()
        self._done: queue.SimpleQueue[tuple[_Job[T] | None, T | BaseException | None]] = queue.SimpleQueue()
        self._open: dict[int, _Job[T]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="openai-engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Number of jobs that have given no result and were not cancelled."""
        return len(self._open)

    def add(self, jobs: Mapping[int, Callable[[httpx.AsyncClient], Awaitable[T]]]) -> None:
        """Begin these jobs; a name may come again when its job is no longer open."""
        for name, work in jobs.items():
            job = self._open[name] = _Job(name, work)
            self._soon(partial(self._inbox.put_nowait, job))

    def wait(self) -> list[T]:
        """Wait a little for jobs to end, and return the results that are there. An exception of a job is
        raised here.
        """
        try:
            found = [self._done.get(timeout=POLL_S)]
        except queue.Empty:  # the caller may have something to add or to cancel
            return []
        found += [self._done.get() for _ in range(self._done.qsize())]
        results: list[T] = []
        for job, result in found:
            if isinstance(result, BaseException):
                raise result
            if job is not None and result is not None and self._open.get(job.name) is job:
                del self._open[job.name]
                results.append(result)
        return results

    def cancel(self, names: set[int]) -> list[int]:
        """Cancel these jobs; returns those that had given no result."""
        ended = [self._open.pop(name) for name in sorted(names) if name in self._open]
        for job in ended:
            self._soon(partial(self._end, job))
        return [job.name for job in ended]

    def stop(self) -> None:
        """End all jobs and the thread."""
        self.cancel(set(self._open))
        self._soon(partial(self._inbox.put_nowait, None))
        self._thread.join()

    def _soon(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has died, which `wait` reports
            self._loop.call_soon_threadsafe(call)

    def _end(self, job: _Job[T]) -> None:
        job.cancelled = True
        if job.task is not None:
            job.task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._all())
        except BaseException as error:  # nobody else would see it, and the reader would wait for ever
            self._done.put((None, error))
        finally:
            self._loop.close()

    async def _all(self) -> None:
        turn = asyncio.Semaphore(self._max_concurrent)
        tasks: set[asyncio.Task[T]] = set()
        async with self._connect() as client:
            while (job := await self._inbox.get()) is not None:
                job.task = asyncio.ensure_future(_work(job, client, turn))
                tasks.add(job.task)
                job.task.add_done_callback(tasks.discard)
                job.task.add_done_callback(partial(self._finish, job))
                if job.cancelled:
                    job.task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, job: _Job[T], task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._done.put((job, None))
        else:
            self._done.put((job, task.exception() or task.result()))


async def _work(job: _Job[T], client: httpx.AsyncClient, turn: asyncio.Semaphore) -> T:
    async with turn:
        return await job.work(client)
