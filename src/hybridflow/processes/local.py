"""The interface of worker processes for objects in this process, where blocking code cannot be ended.

create(factory) ──► the object ──call(method)──► awaited if it is async, else run in a thread
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from hybridflow.data.plugin import load_object
from hybridflow.processes.errors import CallRaised, CallTooLong


class ObjectLike(Protocol):
    """An object of the user's, wherever it is: `Hosted` or `LocalObject`."""

    async def call(self, method: str, /, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Return a method's result. Raises CallRaised, CallTooLong or ProcessLost."""

    def value(self) -> Any:
        """Return the object itself, which has to be able to travel."""

    async def close(self) -> None:
        """Forget the object."""


class HostsLike(Protocol):
    """Processes that objects are made in: `Hosts` or `LocalHosts`."""

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a free worker process."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of calls, of worker processes that died, and of those that were ended, by name."""

    async def create(self, factory: str, *args: Any, deadline_s: float, **kwargs: Any) -> ObjectLike:
        """Make an object by `factory`, "package.module:function" or "path/to/file.py:function"."""

    def close(self) -> None:
        """End all of it."""


class LocalObject:
    """An object of this process; calls of one object come one after the other."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._lock = asyncio.Lock()
        self._late = ""
        """The method whose late call left a thread behind, which may still change the object."""

    async def call(self, method: str, /, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Return a method's result; where it is not async, a call that is late leaves a thread behind.

        Such an object takes no further calls but `close`. Raises CallRaised and CallTooLong.
        """
        async with self._lock:
            if self._late and method != "close":
                raise CallTooLong(f"{method}: the object is still busy with {self._late}, which is too late")
            function = getattr(self._target, method)
            try:
                return await _in_time(function, method, args, kwargs, deadline_s)
            except CallTooLong:
                if not inspect.iscoroutinefunction(function):
                    self._late = method
                raise

    def value(self) -> Any:
        """Return the object."""
        return self._target

    async def close(self) -> None:
        """Do nothing: the object has no other user."""


class LocalHosts:
    """Objects of this process, which wait for no other and count nothing."""

    waiting = 0
    counts: Mapping[str, int] = {}

    async def create(self, factory: str, *args: Any, deadline_s: float, **kwargs: Any) -> LocalObject:
        """Make an object. Raises CallRaised and CallTooLong."""
        function = load_object(factory, key="factory")
        return LocalObject(await _in_time(function, factory, args, kwargs, deadline_s))

    def close(self) -> None:
        """Do nothing: there is no process to end."""


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread that keeps neither an event loop nor the interpreter from ending."""
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # the awaiting call gets it
            _settle(answer, error=error)
        else:
            _settle(answer, result)

    threading.Thread(target=work, name="a tool or an environment", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _settle(
    answer: concurrent.futures.Future[Any], result: Any = None, error: BaseException | None = None
) -> None:
    with suppress(concurrent.futures.InvalidStateError, RuntimeError):  # it is not awaited any longer
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)


async def _in_time(
    function: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any], deadline_s: float
) -> Any:
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            return await in_thread(function, *args, **kwargs)
    except (Exception, SystemExit) as error:  # a user's code, which may raise its own TimeoutError too
        if deadline.expired():
            raise CallTooLong(f"{name} ran past its deadline of {deadline_s:g} seconds") from error
        raise CallRaised.by(error) from error
