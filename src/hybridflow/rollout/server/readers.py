"""Threads that turn requests into jobs: chat templates and tokenisation, away from the event loop.

    request ──run──► queue of short or of long requests ──thread of that queue──► job
        └── its client goes away ──► dropped from the queue, or stopped at its next `check`

The two queues keep one long text from holding up short ones. The threads are daemons of their own and not
those of asyncio, which a process waits for when it ends: a tokenizer that is at work ends with the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from hybridflow.rollout.server.errors import ApiError

T = TypeVar("T")
Check = Callable[[], None]
"""Raises `Abandoned` where nobody waits for the job any longer; called between parts of the work."""

LONG_BODY = 64 * 2**10
"""Bytes of a request from which on it counts as long."""


class Abandoned(Exception):
    """The client of a request has gone away."""


class _Task(Generic[T]):
    """One request that is to be read, and who waits for it."""

    def __init__(self, make: Callable[[Check], T]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = self._loop.create_future()
        self.abandoned = False

    def work(self) -> None:
        """Make the job and hand it, or what was raised, to the event loop."""
        try:
            self._check()
            job = self._make(self._check)
        except BaseException as error:
            self._tell(self._fail, error)
        else:
            self._tell(self._finish, job)

    def _check(self) -> None:
        if self.abandoned:
            raise Abandoned

    def _tell(self, call: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any longer
            self._loop.call_soon_threadsafe(call, value)

    def _finish(self, job: T) -> None:
        if not self.answer.done():
            self.answer.set_result(job)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):  # a future refuses it, and the request would wait for ever
            error = RuntimeError(f"the chat template or the tokenizer raised {error!r}")
        if not self.answer.done():
            self.answer.set_exception(error)


class JobReaders:
    """The two queues and their threads; `run` is called in an event loop."""

    def __init__(self, max_queue: int) -> None:
        """`max_queue`: requests that may wait to be read; more are answered with 429."""
        self.num_open = 0
        """Requests that are read or wait for it."""
        self._max_queue = max_queue
        self._queues: dict[bool, queue.SimpleQueue[_Task[Any]]] = {}
        self._at_work: set[_Task[Any]] = set()

    @property
    def is_working(self) -> bool:
        """Whether a thread is making a job now."""
        return bool(self._at_work)

    async def run(self, make: Callable[[Check], T], num_bytes: int) -> T:
        """Return what `make` makes of a request of `num_bytes`, or raise what it raises.

        Who stops waiting (cancellation) takes the request out of the queue, or has `make` stop at its next
        check. ApiError 429 where too many requests wait.
        """
        if self.num_open >= self._max_queue:
            raise ApiError(
                429,
                f"{self.num_open} requests wait to be tokenised, the limit (--max-queue): try again later",
                code="queue_full",
            )
        task = _Task(make)
        self.num_open += 1
        try:
            self._queue(num_bytes >= LONG_BODY).put(task)
            return await task.answer
        finally:
            task.abandoned = True
            self.num_open -= 1

    def _queue(self, is_long: bool) -> queue.SimpleQueue[_Task[Any]]:
        """Return the queue of short or of long requests; its thread starts with the first one."""
        if is_long not in self._queues:
            tasks: queue.SimpleQueue[_Task[Any]] = queue.SimpleQueue()
            name = "long" if is_long else "short"
            thread = threading.Thread(
                target=self._serve, args=(tasks,), name=f"read {name} requests", daemon=True
            )
            thread.start()
            self._queues[is_long] = tasks
        return self._queues[is_long]

    def _serve(self, tasks: queue.SimpleQueue[_Task[Any]]) -> None:
        """Work in a thread of its own: one task after the other."""
        while True:
            task = tasks.get()
            self._at_work.add(task)
            task.work()
            self._at_work.discard(task)
            del task  # nothing of it is kept until the next one comes
