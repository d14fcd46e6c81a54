"""Objects of this process have the interface of those in worker processes."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from hybridflow.processes.errors import CallRaised, CallTooLong
from hybridflow.processes.local import LocalHosts

LONG = 600.0


class Shelf:
    """An object whose calls would lose each other's changes if they ran side by side."""

    def __init__(self) -> None:
        self.books = 0
        self.may_go_on = threading.Event()
        self.is_closed = False

    async def add(self) -> int:
        books = self.books
        await asyncio.sleep(0)
        self.books = books + 1
        return self.books

    def hangs(self) -> None:
        self.may_go_on.wait(LONG)

    def close(self) -> None:
        self.is_closed = True


class Judge:
    def own_timeout(self) -> None:
        raise TimeoutError("the judge is away")

    def leaves(self) -> None:
        sys.exit(3)

    async def waits(self) -> None:
        await asyncio.sleep(LONG)

    async def answers(self, text: str) -> str:
        return text.upper()


def test_a_call_that_is_late_is_told_from_one_that_raises() -> None:
    async def work() -> None:
        judge = await LocalHosts().create(f"{__name__}:Judge", deadline_s=LONG)
        assert await judge.call("answers", "yes", deadline_s=LONG) == "YES"
        with pytest.raises(CallRaised, match="TimeoutError: the judge is away"):
            await judge.call("own_timeout", deadline_s=LONG)
        with pytest.raises(CallRaised, match="SystemExit: 3"):
            await judge.call("leaves", deadline_s=LONG)
        with pytest.raises(CallTooLong, match="waits ran past its deadline"):
            await judge.call("waits", deadline_s=0.01)

    asyncio.run(work())


def test_calls_of_one_object_come_one_after_the_other() -> None:
    async def work() -> list[int]:
        shelf = await LocalHosts().create(f"{__name__}:Shelf", deadline_s=LONG)
        return await asyncio.gather(*(shelf.call("add", deadline_s=LONG) for _ in range(3)))

    assert asyncio.run(work()) == [1, 2, 3]


def test_an_object_with_a_late_thread_is_only_closed() -> None:
    async def work() -> None:
        shelf = await LocalHosts().create(f"{__name__}:Shelf", deadline_s=LONG)
        with pytest.raises(CallTooLong, match="hangs ran past its deadline"):
            await shelf.call("hangs", deadline_s=0.01)
        with pytest.raises(CallTooLong, match="still busy with hangs"):
            await shelf.call("add", deadline_s=LONG)
        await shelf.call("close", deadline_s=LONG)
        assert shelf.value().is_closed and not shelf.value().books
        shelf.value().may_go_on.set()

    asyncio.run(work())
