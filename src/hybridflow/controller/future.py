"""The result of a call that may still run: parts from the ranks in, one value out, with a name and a deadline
for every wait.

A future may be an argument of another call, `group.call(method, future.by_reference())`: its parts then go
from rank to rank without passing through the driver, where both calls deal alike. `passing.py` has the rules.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from hybridflow.controller.dispatch import Dealt, Dispatch
from hybridflow.controller.mesh import MeshInfo
from hybridflow.errors import WorkerError

R = TypeVar("R")
Part = concurrent.futures.Future[Any]
"""One rank's result to come. A backend may give a subclass of its own, which it can hand on to another rank
without fetching the value.
"""


@dataclass(frozen=True)
class Source:
    """The call that a future is the result of: how it was dealt, and on which ranks."""

    dispatch: Dispatch
    mesh: MeshInfo
    dealt: Dealt


class Future(Generic[R]):
    """The result of a call on some ranks. Wait for it with `result()`, or `await` it.

    `parts` has every rank that was called. `collect` gets the results of those in `taken` (left out: all), in
    the order of ranks.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        collect: Callable[[list[Any]], R],
        *,
        role: str,
        method: str,
        taken: tuple[int, ...] | None = None,
        source: Source | None = None,
    ) -> None:
        self.parts, self._collect, self.role, self.method = dict(sorted(parts.items())), collect, role, method
        self.taken, self.source = tuple(self.parts) if taken is None else taken, source

    def done(self) -> bool:
        """True when no rank is still running."""
        return all(part.done() for part in self.parts.values())

    def result(self, timeout: float | None = None) -> R:
        """The collected result, or the exception of the first rank that failed.

        `timeout` is in seconds; WorkerError names the role, the method and the ranks that have not answered
        by then.
        """
        concurrent.futures.wait(self.parts.values(), timeout, concurrent.futures.FIRST_EXCEPTION)
        for part in self.parts.values():
            error = part.exception() if part.done() else None
            if error is not None:
                raise error
        late = [rank for rank, part in self.parts.items() if not part.done()]
        if late:
            message = f"{self.role}.{self.method} has not finished after {timeout} s on ranks {late}"
            raise WorkerError(message, role=self.role, rank=late[0], method=self.method)
        return self._collect([self.parts[rank].result() for rank in self.taken])

    def get(self) -> R:
        """`result()` without a deadline: what `DataProtoFuture` asks of its parts."""
        return self.result()

    def by_reference(self) -> R:
        """This future, typed as its value: what a call takes in the value's place."""
        return cast(R, self)

    def __await__(self) -> Generator[Any, None, R]:
        parts = [asyncio.wrap_future(part) for part in self.parts.values()]
        results = dict(zip(self.parts, (yield from asyncio.gather(*parts).__await__()), strict=True))
        return self._collect([results[rank] for rank in self.taken])


def replace_parts(value: Any, give: Callable[[Part], Any]) -> Any:
    """The value with `give(part)` in the place of each `Part` in it, at any depth of lists, tuples and
    dictionaries.

    Containers without one are given back as they are, not copied.
    """
    return replace(value, concurrent.futures.Future, give)


def replace(value: Any, kind: type[Any], give: Callable[[Any], Any]) -> Any:
    """The value with `give(found)` in the place of everything of that kind; containers without any are given
    back as they are.
    """
    if isinstance(value, kind):
        return give(value)
    if type(value) is dict:
        entries = {key: replace(entry, kind, give) for key, entry in value.items()}
        return entries if any(entries[key] is not entry for key, entry in value.items()) else value
    if type(value) in (list, tuple):
        items = [replace(entry, kind, give) for entry in value]
        return (
            type(value)(items)
            if any(new is not old for new, old in zip(items, value, strict=True))
            else value
        )
    return value
