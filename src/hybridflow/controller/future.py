"""The result of a call that may still run: parts from the ranks in, one value out, with a name and a deadline for every wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

from hybridflow.errors import WorkerError

R = TypeVar("R")
Part = concurrent.futures.Future[Any]


class Future(Generic[R]):
    """The result of a call on some ranks. Wait for it with `result()`, or `await` it."""

    def __init__(self, parts: Mapping[int, Part], collect: Callable[[list[Any]], R], *, role: str, method: str) -> None:
        self._parts, self._collect, self.role, self.method = dict(sorted(parts.items())), collect, role, method

    def done(self) -> bool:
        """True when no rank is still running."""
        return all(part.done() for part in self._parts.values())

    def result(self, timeout: float | None = None) -> R:
        """The collected result, or the exception of the first rank that failed.

        `timeout` is in seconds; WorkerError names the role, the method and the ranks that have not answered by then.
        """
        concurrent.futures.wait(self._parts.values(), timeout, concurrent.futures.FIRST_EXCEPTION)
        for part in self._parts.values():
            if part.done():
                part.result()  # raises what the rank raised
        late = [rank for rank, part in self._parts.items() if not part.done()]
        if late:
            message = f"{self.role}.{self.method} has not finished after {timeout} s on ranks {late}"
            raise WorkerError(message, role=self.role, rank=late[0], method=self.method)
        return self._collect([part.result() for part in self._parts.values()])

    def get(self) -> R:
        """`result()` without a deadline: what `DataProtoFuture` asks of its parts."""
        return self.result()

    def __await__(self) -> Generator[Any, None, R]:
        parts = [asyncio.wrap_future(part) for part in self._parts.values()]
        results = yield from asyncio.gather(*parts).__await__()
        return self._collect(list(results))
