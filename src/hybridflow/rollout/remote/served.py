"""An engine behind an HTTP server: requests stream back on one connection each, and its exit is noticed.

PushedEngine ──start──► pool of threads ──open──► Stream ──pieces──► queue ──poll──► PushedEngine
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.remote.http import Address, HttpCall, Refused, ServerGone, ServerProcess
from hybridflow.rollout.remote.runner import EngineDied, ResponsePiece, Submission
from hybridflow.weight_sync.wire.channel import LOOPBACK
from hybridflow.weight_sync.wire.receiver import Weights
from hybridflow.weight_sync.wire.sender import CallWorkers, KeptGroup, Transport, address_towards, push

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_UNWELL_S = 5.0
"""Seconds from a call that failed in the server to where it may say that it is not well."""


@dataclass(eq=False)
class Stream:
    """A response that is being streamed. `read`: returns the piece of an event, or None where it has none."""

    call: HttpCall
    read: Callable[[dict[str, Any]], ResponsePiece | None]

    def pieces(self) -> Iterator[ResponsePiece]:
        """Yield the pieces to the last one; ServerGone where the stream ends before it, Refused."""
        for event in self.call.events():
            if "error" in event:
                code = event["error"].get("code")
                raise Refused(
                    event["error"].get("message", event["error"]), code if isinstance(code, int) else 0
                )
            piece = self.read(event)
            if piece is not None:
                yield piece
                if piece.finish is not None:
                    return
        raise ServerGone("the stream ended before the response did")

    def close(self) -> None:
        """Close the connection, so that the server drops the request."""
        self.call.hang_up()


@dataclass(eq=False)
class _Job:
    """One request at the server. A piece counts while its job is the request's newest."""

    request_id: int
    stream: Stream | None = None


@dataclass(eq=False)
class Served(ABC):
    """Base class of runners over a server."""

    engine: ClassVar[str]
    """The engine's name in messages."""

    address: Address
    process: ServerProcess | None
    """The server's process, None where it ran already."""
    _: KW_ONLY
    max_streams: int
    """Connections at a time."""
    timeout: float
    """Seconds for one call."""
    bucket_bytes: int
    transport: Transport | None = None
    """How weights are pushed; None to choose by where the server is."""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.max_streams, thread_name_prefix=self.engine)
        self._pieces: queue.SimpleQueue[tuple[_Job, ResponsePiece | ServerGone]] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._death: str | None = None
        self._workers = 1
        self._group = KeptGroup()

    @classmethod
    def of(
        cls,
        config: RolloutConfig,
        replica: int,
        start: Callable[[], tuple[Address, ServerProcess]],
        **more: Any,
    ) -> Self:
        """Return the runner over the server of a replica, by its number: the one of the configuration,
        or the one that `start` starts. `more`: the fields of a subclass.
        """
        server = config.server
        process = None
        if server.address is None:
            logger.info("an %s server starts, which may take minutes", cls.engine)
            address, process = start()
        else:
            address = Address(server.address if isinstance(server.address, str) else server.address[replica])
        return cls(
            address,
            process,
            max_streams=config.max_num_seqs,
            timeout=server.push_timeout,
            bucket_bytes=config.update_weights_bucket_megabytes * 2**20,
            transport=None if server.transport == "auto" else server.transport,
            **more,
        )

    @property
    def name(self) -> str:
        """The engine's name for messages."""
        name = f"{self.engine} server {self.address.url}"
        if self.process is not None:
            name += f" (process {self.process.pid})"
        return name

    @abstractmethod
    def open(self, submission: Submission) -> Stream:
        """Begin a response; raises ServerGone."""

    def start(self, submissions: Sequence[Submission]) -> None:
        """Queue these requests; raises EngineDied."""
        self._alive()
        jobs = [_Job(submission.request_id) for submission in submissions]
        with self._lock:
            self._jobs |= {job.request_id: job for job in jobs}
        for submission, job in zip(submissions, jobs):
            self._pool.submit(self._stream, submission, job)

    def poll(self) -> list[ResponsePiece]:
        """Return the pieces that have come, none where another thread aborted them all; raises EngineDied."""
        try:
            found = [self._pieces.get(timeout=_POLL_S)]
        except queue.Empty:
            self._alive()
            return []
        # and not until it is empty: more may come all the time
        found += [self._pieces.get() for _ in range(self._pieces.qsize())]
        found = [(job, each) for job, each in found if self._is_wanted(job)]
        pieces = [each for _, each in found if isinstance(each, ResponsePiece)]
        gone = [(job, each) for job, each in found if isinstance(each, ServerGone)]
        if gone and not pieces:
            raise self._died(str(gone[0][1]))
        if gone:
            self._pieces.put(gone[0])  # what came before it is not lost
        with self._lock:
            for piece in pieces:
                if piece.finish is not None:
                    self._jobs.pop(piece.request_id, None)
        return pieces

    def abort(self, request_ids: Iterable[int]) -> None:
        """Close the connections of these requests; pieces that come later are dropped."""
        with self._lock:
            jobs = [self._jobs.pop(request_id, None) for request_id in request_ids]
        for job in jobs:
            if job is not None and job.stream is not None:
                job.stream.close()

    def close(self) -> None:
        """End the server if it was started here."""
        self._death = self._death or "it was closed"
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._group.close()
        if self.process is not None:
            self.process.stop()

    def _stream(self, submission: Submission, job: _Job) -> None:
        if not self._is_wanted(job):
            return
        try:
            job.stream = self.open(submission)
            if not self._is_wanted(job):
                job.stream.close()
                return
            for piece in job.stream.pieces():
                self._pieces.put((job, piece))
        except Refused as error:
            self._pieces.put((job, self._refused(job, error)))
        except ServerGone as error:
            self._pieces.put((job, error))
        except Exception as error:  # an unforeseen answer must not leave the caller waiting
            self._pieces.put((job, ResponsePiece.failed(job.request_id, f"{type(error).__name__}: {error}")))

    def _refused(self, job: _Job, error: Refused) -> ResponsePiece | ServerGone:
        """Return the failure of this request alone, or of the server."""
        if ends := self._ends(error, patience=0.0):
            return ServerGone(ends)
        return ResponsePiece.failed(job.request_id, f"{self.engine} refused it: {error}")

    def _ends(self, error: Refused, *, patience: float) -> str | None:
        """Return why the server is about to end itself, or None where what it refused was at fault.

        Where one of its processes has ended it fails whatever it is asked, then says that it is not well;
        it is asked for `patience` seconds.
        """
        if 400 <= error.status < 500:
            return None
        until = time.monotonic() + patience
        while True:
            try:
                self.address.call("/health", timeout=self.timeout, method="GET")
            except ServerGone as gone:
                return f"{error}; {gone}"
            except Refused as unwell:
                if unwell.status == 503:
                    return f"{error}; {unwell}"
            if time.monotonic() >= until:
                return None
            time.sleep(0.2)

    def _is_wanted(self, job: _Job) -> bool:
        with self._lock:
            return self._jobs.get(job.request_id) is job

    def _push(self, call: CallWorkers, weights: Weights, version: int, **more: Any) -> None:
        """Push weights to all workers, which `call` asks to receive; RolloutError where they are lost."""
        transport: Transport = "process_group"
        host = LOOPBACK
        if self.address.host in (LOOPBACK, "localhost"):
            transport = "shared_memory"
        else:
            host = address_towards(self.address.host, self.address.port)
        push(
            call,
            weights,
            version,
            workers=self._workers,
            transport=self.transport or transport,
            host=host,
            bucket_bytes=self.bucket_bytes,
            timeout=self.timeout,
            kept=self._group,
            **more,
        )

    def _get(self, path: str) -> Any:
        return json.loads(self._ask(path, None, "GET"))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        return self._ask(path, body, "POST")

    def _ask(self, path: str, body: dict[str, Any] | None, method: str) -> bytes:
        self._alive()
        try:
            return self.address.call(path, body, timeout=self.timeout, method=method)
        except ServerGone as error:
            raise self._died(str(error)) from error
        except Refused as error:
            if ends := self._ends(error, patience=_UNWELL_S):
                raise self._died(ends) from error
            raise

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
