"""The worker's side of `hosts.py`: it makes objects and calls their methods, one call after the other.

    driver ──Request──► worker ──BEGUN, when the user's files are loaded and the object is there──► driver
                               ──Reply: a result or an error, and the object's new state──────────► driver

Requests and replies are pickles: the objects and what they return are made by code that the user has chosen.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.data.plugin import awaited, load_object
from hybridflow.processes.channel import DriverEnd, dumps
from hybridflow.processes.errors import CallRaised

BEGUN = b""
"""The message that the deadline of a call counts from."""


@dataclass(frozen=True)
class Request:
    """One call, of a factory or of a method."""

    factory: str
    """Maker of the object, "package.module:name" or "path/to/file.py:name"; "" to call a method."""
    method: str
    arguments: bytes
    """Pickle of (args, kwargs)."""
    state: bytes | None = None
    """Pickle of the object whose method is called; None where this worker has it."""


@dataclass(frozen=True)
class Reply:
    """The result of a request."""

    result: bytes = b""
    """Pickle of what the method returned."""
    error: CallRaised | None = None
    state: bytes | None = None
    """Pickle of the object after the call; None if it stays in this worker, or is as it was before."""
    kept: str = ""
    """Why the object stays in this worker; "" if it does not."""


class Host:
    """Answers requests; between them it has no object, or the one that cannot travel."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._object: Any = None
        self._runner = asyncio.Runner()

    def answer(self, request: Request) -> Reply:
        """Execute a request; what the user's code raises becomes part of the reply."""
        reply = Reply()
        try:
            function, args, kwargs = self._prepare(request)
            self._begin()
            result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = self._runner.run(awaited(result))
            if request.factory:
                self._object = result
            else:
                reply = Reply(dumps(result))
        except BaseException as error:  # a user's code; sys.exit() inside it is its error too
            reply = Reply(error=CallRaised.by(error))
        return self._with_state(request, reply)

    def _prepare(self, request: Request) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        if self._object is not None and (request.factory or request.state is not None):
            self._object = None  # it stayed here, and is closed
            gc.collect()
        function: Callable[..., Any]
        if request.factory:
            function = load_object(request.factory, key="factory")
        else:
            if request.state is not None:
                self._object = pickle.loads(request.state)
            function = getattr(self._object, request.method)
        args, kwargs = pickle.loads(request.arguments)
        return function, args, kwargs

    def _with_state(self, request: Request, reply: Reply) -> Reply:
        if self._object is None:
            return reply
        try:
            reply = replace(reply, state=dumps(self._object))
        except BaseException as error:  # a user's code
            if reply.error is None or request.state is None:
                return replace(reply, kept=f"{type(error).__name__}: {error}")
            # after an error, the state that the driver has is good enough
        self._object = None
        return reply


def main(file_descriptor: int) -> None:
    """Serve on the inherited socket `file_descriptor`."""
    driver = DriverEnd(file_descriptor)
    host = Host(lambda: driver.write(BEGUN))
    while True:
        request = pickle.loads(driver.inbox.get())
        driver.write(pickle.dumps(host.answer(request)))
