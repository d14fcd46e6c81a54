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
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hybridflow.rollout.server.errors import ApiError

T = TypeVar("T")
Check = Callable[[], None]
"""Raises `Abandoned` where nobody waits for the job any longer; called between parts of the work."""

LONG_BODY = 64 * 2**10
"""Bytes of a request from which on it counts as long."""


class Abandoned(Exception):
    """The client of a request has gone away."""


@dataclass(eq=False)
class _Task(Generic[T]):
    """One request that is to be read, and who waits for it."""

    make: Callable[[Check], T]
    check_open: Check
    answer: Future[T] = field(default_factory=Future)
    abandoned: bool = False

    def work(self) -> None:
        """Make the job and hand it, or what was raised, to the event loop."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self.make(self._check))
        except StopIteration as error:  # an awaitable cannot raise it, and the request would wait for ever
            told = RuntimeError(f"the chat template or the tokenizer raised {error!r}")
            self.answer.set_exception(told)
        except BaseException as error:
            self.answer.set_exception(error)

    def _check(self) -> None:
        if self.abandoned:
            raise Abandoned
        self.check_open()


class JobReaders:
    """The two queues and their threads; `run` is called in an event loop. `max_queue`: requests that may wait
    to be read; more are answered with 429. `check_open` raises where nothing more is to be read.
    """

    def __init__(self, max_queue: int, check_open: Check) -> None:
        self.num_open = 0
        """Requests that are read or wait for it."""
        self._max_queue = max_queue
        self._check_open = check_open
        self._short = self._queue("short")
        self._long = self._queue("long")

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
        task = _Task(make, self._check_open)
        tasks = self._short
        if num_bytes >= LONG_BODY:
            tasks = self._long
        self.num_open += 1
        try:
            tasks.put(task)
            return await asyncio.wrap_future(task.answer)
        finally:
            task.abandoned = True
            self.num_open -= 1

    def _queue(self, name: str) -> queue.SimpleQueue[_Task[Any]]:
        """Return a queue of requests, with a thread of its own that reads one after the other."""
        tasks: queue.SimpleQueue[_Task[Any]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                task = tasks.get()
                task.work()
                del task  # nothing of it is kept until the next one comes

        threading.Thread(target=work, name=f"read {name} requests", daemon=True).start()
        return tasks
