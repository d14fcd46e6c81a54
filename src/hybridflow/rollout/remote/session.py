"""A session of an engine with weights of its own: requests in, pieces of responses from its `Runner`, outputs
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    RolloutStats,
    TopTokens,
)
from hybridflow.rollout.push.receiver import NOTHING
from hybridflow.rollout.remote.runner import EngineDied, Piece, Runner, Submission
from hybridflow.rollout.requests import check_ids, sort_out, whole_of


@dataclass
class _Row:
    """A response so far, of which the request itself has what was begun."""

    request: GenerationRequest
    version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.token_ids.extend(piece.token_ids)
        self.log_probs.extend(piece.log_probs)
        wanted = self.request.sampling.top_log_probs  # an engine may give the sampled token beside them
        if wanted:
            self.top.extend(place[:wanted] for place in piece.top)

    def output(
        self, reason: FinishReason, error: str | None = None, stop_reason: int | str | None = None
    ) -> GenerationOutput:
        """Return the output with the tokens so far."""
        versions = [self.version] * len(self.token_ids)
        number = self.request.request_id
        if error is not None:
            error = f"request {number}: {error}"
        rest = GenerationOutput(
            number, self.token_ids, self.log_probs, reason, versions, error, stop_reason, self.top
        )
        return whole_of(self.request, rest)


@dataclass(eq=False)
class PushedSession:
    """An `EngineSession` over a `Runner`. The engine's process is asked for its version when a request joins
    and none runs; while requests run, no weights are pushed.
    """

    runner: Runner
    stats: RolloutStats
    problem: Callable[[GenerationRequest], str | None]
    submission: Callable[[GenerationRequest], Submission]
    version: Callable[[], int]
    closed: Callable[[], None]

    def __post_init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._version = NOTHING

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now; -1 before the first request."""
        return self._version

    @property
    def num_running(self) -> int:
        """Number of requests that the engine has; it does not say which of them wait."""
        return len(self._rows)

    @property
    def idle(self) -> bool:
        """Whether the engine has no request."""
        return not self._rows

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Hand requests to the engine; those that cannot be served come back at once, as do all where it is
        dead. RolloutError for an id that is in use, and without weights.
        """
        if not requests:
            return []
        began = perf_counter()
        check_ids(requests, self._rows)
        if not self._rows:
            self._version = self.version()
        if self._version == NOTHING:
            raise RolloutError(
                f"{self.runner.name} has no weights yet, or only a part of a push came: update_weights must "
                "come first"
            )
        good, outputs = sort_out(requests, self.problem)
        self._rows |= {request.request_id: _Row(request, self._version) for request in good}
        self.stats.prefill_tokens += sum(len(context) for context in {one.context for one in good})
        self.stats.max_rows = max(self.stats.max_rows, len(self._rows))
        try:
            if good:
                self.runner.start([self.submission(request) for request in good])
        except EngineDied as error:
            outputs += self._lost(error)
        self.stats.seconds += perf_counter() - began
        return outputs

    def step(self) -> list[GenerationOutput]:
        """Wait a while for the next pieces, and return the outputs that are finished by them; when the engine
        dies, all that are not, with what they have and an error that names it.
        """
        began = perf_counter()
        try:
            pieces = self.runner.poll()
        except EngineDied as error:
            return self._lost(error)
        self.stats.decode_steps += 1
        outputs = []
        for piece in pieces:
            row = self._rows.get(piece.request_id)
            if row is None:  # aborted meanwhile
                continue
            row.add(piece)
            self.stats.generated_tokens += len(piece.token_ids)
            if piece.finish is not None and self._rows.pop(piece.request_id, None) is not None:
                outputs.append(row.output(piece.finish, piece.error, piece.stop_reason))
        self.stats.seconds += perf_counter() - began
        return outputs

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End these requests and return their partial responses; may come from another thread."""
        popped = [self._rows.pop(request_id, None) for request_id in set(request_ids)]
        rows = [row for row in popped if row is not None]
        if rows:
            self.runner.abort([row.request.request_id for row in rows])
        return [row.output("abort") for row in rows]

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return the tokens of running requests beyond the first `since[request_id]` ones."""
        partials = []
        for number, start in since.items():
            row = self._rows.get(number)
            if row is not None:
                have = row.output("abort")
                top = have.top_log_probs and have.top_log_probs[start:]
                partials.append(
                    PartialOutput(number, start, have.token_ids[start:], have.log_probs[start:], top)
                )
        return partials

    def close(self) -> None:
        """Abort what runs, and let the engine be used otherwise."""
        self.abort(list(self._rows))
        self.closed()

    def _lost(self, error: EngineDied) -> list[GenerationOutput]:
        lost = list(self._rows.values())
        self._rows = {}
        return [row.output("error", str(error)) for row in lost]
