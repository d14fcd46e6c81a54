"""A session of the hf engine: whole batches, one a step. Requests that join wait for the end of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput
from hybridflow.rollout.hf.batch import Batch
from hybridflow.rollout.requests import aborted, check_ids, sort_out


@dataclass(eq=False, kw_only=True)
class HFSession:
    """An `EngineSession`; `abort` may come from another thread while a batch is decoded.

    `problem` returns the reason why a request cannot be served, `next_batch` a batch of the first waiting
    requests; `run` fills the rows of a batch. `version`: of the weights there are now.
    """

    problem: Callable[[GenerationRequest], str | None]
    next_batch: Callable[[Sequence[GenerationRequest]], Batch]
    run: Callable[[Batch], None]
    version: Callable[[], int]
    closed: Callable[[], None]

    def __post_init__(self) -> None:
        self._waiting: list[GenerationRequest] = []
        self._batch: Batch | None = None

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now."""
        return self.version()

    @property
    def num_running(self) -> int:
        """Number of requests in the batch that is decoded."""
        if self._batch is None:
            return 0
        return len(self._batch.rows)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self._batch is None and not self._waiting

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Add requests to those that wait; those that cannot be served come back. RolloutError for an id in
        use.
        """
        decoded = [] if self._batch is None else [row.request for row in self._batch.rows]
        check_ids(requests, {request.request_id for request in [*self._waiting, *decoded]})
        good, outputs = sort_out(requests, self.problem)
        self._waiting += good
        return outputs

    def step(self) -> list[GenerationOutput]:
        """Decode one batch to its end; outputs of rows that were aborted meanwhile came from `abort`."""
        if not self._waiting:
            return []
        batch = self._batch = self.next_batch(self._waiting)
        self._waiting = self._waiting[len(batch.rows) :]
        try:
            self.run(batch)
        finally:
            self._batch = None
        return [row.output() for row in batch.rows if row.finish_reason != "abort"]

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End waiting requests at once, and those of the batch before their next token. A row that finished
        by itself comes out of `step`.
        """
        wanted = set(request_ids)
        outputs = [aborted(request) for request in self._waiting if request.request_id in wanted]
        self._waiting = [request for request in self._waiting if request.request_id not in wanted]
        if self._batch is not None:
            outputs += [row.output() for row in self._batch.abort(wanted)]
        return outputs

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return nothing: between two steps no response is in part there."""
        return []

    def close(self) -> None:
        """Drop what waits, and let the engine be used otherwise."""
        self._waiting = []
        self.closed()
