"""HTTP calls that run concurrently on an event loop in a thread, and yield results as they finish."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Calls(Generic[T]):
    """Named jobs on one client, at most `max_concurrent` at a time; for one reader, and `cancel` for any
    thread.
    """

    def __init__(
        self,
        jobs: Mapping[int, Callable[[httpx.AsyncClient], Awaitable[T]]],
        connect: Callable[[], httpx.AsyncClient],
        max_concurrent: int,
    ) -> None:
        self._jobs = jobs
        self._connect = connect
        self._max_concurrent = max_concurrent
        self._done: queue.SimpleQueue[tuple[int | None, T | BaseException | None]] = queue.SimpleQueue()
        self._open = set(jobs)
        self._cancelled = set[int]()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="openai-engine", daemon=True)
        self._thread.start()

    def results(self) -> Iterator[T]:
        """Yield the result of each job that was not cancelled; an exception of a job is raised here."""
        while self._open:
            name, result = self._done.get()
            if isinstance(result, BaseException):
                raise result
            if name in self._open:  # else it was cancelled, in whatever state it was
                self._open.discard(name)
                if result is not None:
                    yield result

    def cancel(self, names: set[int]) -> list[int]:
        """Cancel these jobs; returns those that had given no result."""
        ended = sorted(names & self._open)
        self._open -= names
        self._cancelled |= set(ended)
        if ended and self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._end, ended)
            except RuntimeError:  # the loop has just closed: all jobs are done
                return ended
        return ended

    def stop(self) -> None:
        """End all jobs and the thread."""
        self.cancel(set(self._open))
        self._thread.join()

    def _end(self, names: list[int]) -> None:
        for name in names:
            if task := self._tasks.get(name):
                task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._all())
        except BaseException as error:  # nobody else would see it, and the reader would wait for ever
            self._done.put((None, error))
        finally:
            self._loop.close()

    async def _all(self) -> None:
        turn = asyncio.Semaphore(self._max_concurrent)
        async with self._connect() as client:
            self._tasks = {
                name: asyncio.ensure_future(self._finish(name, client, turn)) for name in self._jobs
            }
            await asyncio.gather(*self._tasks.values())

    async def _finish(self, name: int, client: httpx.AsyncClient, turn: asyncio.Semaphore) -> None:
        result: T | BaseException | None = None
        try:
            async with turn:
                if name not in self._cancelled:
                    result = await self._jobs[name](client)
        except asyncio.CancelledError:
            result = None
        except Exception as error:
            result = error
        self._done.put((name, result))
