"""An engine behind an HTTP server: requests stream back on one connection each, and its death is noticed.

PushedEngine ──start──► pool of threads ──open──► Stream ──pieces──► queue ──poll──► PushedEngine
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hybridflow.rollout.push.sender import CallWorkers, Transport, address_towards, push
from hybridflow.rollout.push.tunnel import LOOPBACK
from hybridflow.rollout.remote.http import Address, ServerGone
from hybridflow.rollout.remote.process import ServerProcess
from hybridflow.rollout.remote.runner import EngineDied, Piece, Submission

_LOCAL = (LOOPBACK, "localhost")
_POLL_S = 0.5


class Stream(Protocol):
    """A response that is being streamed."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces to the last one; ServerGone where the stream ends before it."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(eq=False)
class _Call:
    """One request at the server. A piece counts while its call is the request's newest."""

    request_id: int
    stream: Stream | None = None


class Served(ABC):
    """Base class of runners over a server. `process`: the server's process, None where it ran already.

    `max_streams`: connections at a time. `timeout`: seconds for one call. `transport`: None to choose by
    where the server is.
    """

    engine = ""
    """The engine's name in messages."""

    def __init__(
        self,
        address: Address,
        process: ServerProcess | None,
        *,
        max_streams: int,
        timeout: float,
        transport: Transport | None = None,
        bucket_bytes: int,
    ) -> None:
        self.address = address
        self.process = process
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        local = address.host in _LOCAL
        self.transport: Transport = transport or ("shared_memory" if local else "process_group")
        self._pool = ThreadPoolExecutor(max_streams, thread_name_prefix=self.engine)
        self._pieces: queue.SimpleQueue[tuple[_Call, Piece | ServerGone]] = queue.SimpleQueue()
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        self._death: str | None = None

    @property
    def name(self) -> str:
        """The engine's name for messages."""
        name = f"{self.engine} server {self.address.url}"
        if self.process is not None:
            name += f" (process {self.process.pid})"
        return name

    @property
    def own_host(self) -> str:
        """Address of this machine that the server can reach."""
        if self.address.host in _LOCAL:
            return LOOPBACK
        return address_towards(self.address.host, self.address.port)

    @abstractmethod
    def open(self, submission: Submission) -> Stream:
        """Begin a response; raises ServerGone."""

    def start(self, submissions: Sequence[Submission]) -> None:
        """Queue these requests; raises EngineDied."""
        self._alive()
        calls = [_Call(submission.request_id) for submission in submissions]
        with self._lock:
            self._calls |= {call.request_id: call for call in calls}
        for submission, call in zip(submissions, calls):
            self._pool.submit(self._stream, submission, call)

    def poll(self) -> list[Piece]:
        """Return the pieces that have come, none where another thread aborted them all; raises EngineDied."""
        try:
            found = [self._pieces.get(timeout=_POLL_S)]
        except queue.Empty:
            self._alive()
            return []
        # and not until it is empty: more may come all the time
        found += [self._pieces.get() for _ in range(self._pieces.qsize())]
        found = [(call, each) for call, each in found if self._calls.get(call.request_id) is call]
        pieces = [each for _, each in found if isinstance(each, Piece)]
        gone = [(call, each) for call, each in found if isinstance(each, ServerGone)]
        if gone and not pieces:
            raise self._died(str(gone[0][1]))
        if gone:
            self._pieces.put(gone[0])  # what came before it is not lost
        with self._lock:
            for piece in pieces:
                if piece.finish is not None:
                    self._calls.pop(piece.request_id, None)
        return pieces

    def abort(self, request_ids: Iterable[int]) -> None:
        """Close the connections of these requests; pieces that come later are dropped."""
        with self._lock:
            calls = [self._calls.pop(request_id, None) for request_id in request_ids]
        for call in calls:
            if call is not None and call.stream is not None:
                call.stream.close()

    def close(self) -> None:
        """End the server if it was started here."""
        self._death = self._death or "it was closed"
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.process is not None:
            self.process.stop()

    def _stream(self, submission: Submission, call: _Call) -> None:
        if not self._is_wanted(call):
            return
        try:
            stream = self.open(submission)
            with self._lock:
                wanted = self._calls.get(call.request_id) is call
                call.stream = stream
            if not wanted:
                stream.close()
                return
            for piece in stream.pieces():
                self._pieces.put((call, piece))
        except ServerGone as error:
            if self._is_wanted(call):
                self._pieces.put((call, error))
        except Exception as error:  # an answer that nobody foresaw must not leave the caller waiting
            said = f"{type(error).__name__}: {error}"
            self._pieces.put((call, Piece(call.request_id, finish="error", error=said)))

    def _is_wanted(self, call: _Call) -> bool:
        with self._lock:
            return self._calls.get(call.request_id) is call

    def _push(
        self,
        call: CallWorkers,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        workers: int,
        **more: Any,
    ) -> None:
        """Push weights to all workers, which `call` asks to receive; RolloutError where they are lost."""
        push(
            call,
            weights,
            version,
            workers=workers,
            transport=self.transport,
            host=self.own_host,
            bucket_bytes=self.bucket_bytes,
            timeout=self.timeout,
            more=more,
        )

    def _guarded(self, call: Callable[[], Any]) -> Any:
        self._alive()
        try:
            return call()
        except ServerGone as error:
            raise self._died(str(error)) from error

    def _alive(self) -> None:
        if self._death is not None:
            raise EngineDied(f"{self.name} died earlier: {self._death}")
        if self.process is not None and self.process.exit_code() is not None:
            raise self._died("its process ended")

    def _died(self, reason: str) -> EngineDied:
        self._death = reason
        if self.process is not None:
            self._death += self.process.last_words()
        return EngineDied(f"{self.name} died: {self._death}")
