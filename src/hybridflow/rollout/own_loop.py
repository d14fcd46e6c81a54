"""An event loop in a thread of its own, for asynchronous work beside a thread that blocks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_SECONDS = 60.0
"""Longest wait for work that was cancelled."""


@contextmanager
def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> Iterator[concurrent.futures.Future[T]]:
    """Give a future of what `work` returns or raises; where the context is left before, it is cancelled.

    Tasks that `work` leaves behind are cancelled; the context is left without those that do not heed it.
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
        except BaseException as error:  # whoever asks for the result is told
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
