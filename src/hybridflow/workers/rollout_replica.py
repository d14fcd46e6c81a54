"""The callers' end of one replica: it sends requests to the worker and hands their outputs to the callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from hybridflow.controller import Future
from hybridflow.controller.backend import Peers
from hybridflow.errors import WorkerError
from hybridflow.rollout.base import GenerationOutput, GenerationRequest
from hybridflow.rollout.client import ReplicaLost
from hybridflow.rollout.engine_replica import Tap
from hybridflow.rollout.session_engine import check_ids
from hybridflow.workers.rollout import Kind, RolloutWorker


class WorkerReplica:
    """A replica in the workers (`client.Replica`) for requests of one kind; any thread may call its methods.

    It takes requests while it is open. `rank` is the replica's first. `clock` gives the seconds that
    deadlines count.
    """

    def __init__(
        self, group: Peers, rank: int, kind: Kind = "main", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = f"{group.role}-{rank}"
        self.rank = rank
        self.version: int | None = None
        """Version of the weights, as of the engine's last report."""
        self.failure: str | None = "nothing is generated yet: use opened(), generate() or run()"
        self._group = group
        self._kind = kind
        self._clock = clock
        self._opening = 0
        self._lock = threading.Lock()
        self._answers: dict[int, concurrent.futures.Future[GenerationOutput]] = {}
        self._unsent: list[GenerationRequest] = []
        self._sent: Future[None] | None = None  # the newest call of `submit`; earlier ones end before it
        self._looked: Future[int] | None = None
        self._waiting = 0

    @property
    def load(self) -> int:
        """Number of requests without an answer."""
        return len(self._answers)

    @property
    def clock(self) -> float:
        """Seconds in which the engines were stepped for these requests: a deadline does not count updates of
        the weights, training on the same devices, and validations.
        """
        return self._clock()

    @property
    def waiting(self) -> int:
        """Requests that had no room in the engine at its last report; each access asks for a new one."""
        with suppress(WorkerError):  # it is lost, which waits for its answers raise
            if self._looked is not None and self._looked.done():
                looked = self._looked
                self._looked = None
                self._waiting = looked.result()
            if self._looked is None:
                self._looked = self._group.call_one(self.rank, RolloutWorker.num_waiting, self._kind)
        return self._waiting

    def submit(
        self, request: GenerationRequest, tap: Tap | None = None
    ) -> concurrent.futures.Future[GenerationOutput]:
        """Return a future of the output, which comes whole: `tap` gets no pieces. Errors as in
        `submit_many`.

        What one round of an event loop submits is sent together, and joins before the same step: a call to
        another process costs as much as many requests, and the numbers do not depend on which of them was
        there first.
        """
        with self._lock:
            future = self._noted([request])[0]
            self._unsent.append(request)
        try:
            asyncio.get_running_loop().call_soon(self._send_later)
        except RuntimeError:  # the caller runs in no event loop
            self._send()
        return future

    def submit_many(
        self, requests: Sequence[GenerationRequest]
    ) -> list[concurrent.futures.Future[GenerationOutput]]:
        """Return a future of each output; all requests join before the same step.

        RolloutError for an id that is running, ReplicaLost where the replica is closed.
        """
        with self._lock:
            futures = self._noted(requests)
            self._unsent += requests
        self._send()
        return futures

    def _noted(
        self, requests: Sequence[GenerationRequest]
    ) -> list[concurrent.futures.Future[GenerationOutput]]:
        if self.failure is not None:
            raise ReplicaLost(self.failure)
        check_ids(requests, self._answers)
        futures = [concurrent.futures.Future[GenerationOutput]() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            future.set_running_or_notify_cancel()  # a caller that gives up says abort()
            self._answers[request.request_id] = future
        return futures

    def _send_later(self) -> None:
        with suppress(Exception):  # waits for the answers raise it
            self._send()

    def _send(self) -> None:
        """Send the submitted requests; where that fails, all requests without an answer fail."""
        try:
            with self._lock:
                requests = self._unsent
                self._unsent = []
                if requests:
                    self._sent = self._group.call_one(
                        self.rank, RolloutWorker.submit, requests, self._kind, self._opening
                    )
        except Exception as error:
            self.lose(f"replica {self.name} was not reached: {type(error).__name__}: {error}")
            raise

    def wait_until_submitted(self) -> None:
        """Wait until the worker has all submitted requests."""
        self._send()
        if self._sent is not None:
            self._sent.result()

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests with their tokens so far; unknown ones are ignored."""
        with suppress(WorkerError):  # it is lost, and with it what was to end
            self._send()
            self._group.call_one(self.rank, RolloutWorker.abort, list(request_ids), self._kind)

    def close(self, timeout_s: float = 60.0) -> None:
        """Accept no more requests; those without an answer get ReplicaLost."""
        self.lose(f"replica {self.name} was closed")

    def open(self, opening: int = 0) -> None:
        """Take requests from now on; `opening` is that of `RolloutWorker.submit`."""
        self._opening = opening
        self.failure = None

    def answer(self, output: GenerationOutput) -> None:
        """Give an output to its caller, if one waits for it."""
        with self._lock:
            future = self._answers.pop(output.request_id, None)
        if future is not None:
            future.set_result(output)

    def lose(self, failure: str) -> None:
        """Fail the requests without an answer, and refuse others, for this reason."""
        with self._lock:
            self.failure = failure
            left = self._answers
            self._answers = {}
            self._unsent = []
        if left:
            with suppress(WorkerError):  # the worker itself may be what is lost
                self._group.call_one(self.rank, RolloutWorker.forget, self._kind)
        for future in left.values():
            future.set_exception(ReplicaLost(failure))
