"""An engine that holds its own weights as a `RolloutEngine`, and its sessions: the same requests and outputs
as the native engine.

requests ──check──► errors (that request only)
    └──► EngineRunner ──pieces──► rows ──► outputs, as they finish; where the engine dies: EngineDied
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    RolloutStats,
    TopTokens,
)
from hybridflow.rollout.remote.runner import EngineDied, EngineRunner, ResponsePiece, Submission
from hybridflow.rollout.session_engine import (
    SessionEngine,
    check_ids,
    request_problem,
    rest_of,
    rest_problem,
    sort_out,
    whole_of,
)
from hybridflow.weight_sync.wire.receiver import NOTHING, Weights

logger = logging.getLogger(__name__)
PARTS = ("weights", "kv_cache")
"""What an engine's memory holds, by the names that vLLM and SGLang use."""


class PushedEngine(SessionEngine):
    """A `RolloutEngine` over an `EngineRunner`; a subclass translates requests for its engine.

    Its weights come by `update_weights` only; before the first push it refuses to generate. `frees_cache`:
    `sleep` gives memory back (`rollout.free_cache_engine`). `texts`: the engine has a tokenizer.
    """

    def __init__(
        self,
        runner: EngineRunner,
        *,
        eos_token_ids: Sequence[int],
        frees_cache: bool = True,
        texts: bool = True,
    ) -> None:
        super().__init__()
        self.runner = runner
        self.frees_cache = frees_cache
        self.texts = texts
        try:
            self._facts = runner.facts()
        except BaseException:  # what was started for it would outlive it
            runner.close()
            raise
        vocabulary = self._facts["vocabulary"]  # an end token outside of it never comes, and may not be named
        self.eos_token_ids = tuple(dict.fromkeys(token for token in eos_token_ids if token < vocabulary))
        self._pushed = False
        self._level = 0
        self._sleeping: tuple[str, ...] = ()  # of PARTS
        self._said_nothing_sleeps = False

    @property
    def policy_version(self) -> int:
        """Version of the weights, as the engine's own process reports it; -1 before this run's first push."""
        if not self._pushed:
            return NOTHING
        return self.runner.version()

    @property
    def asleep(self) -> bool:
        """Whether a part of its memory is freed."""
        return bool(self._sleeping)

    def set_version(self, version: int) -> None:
        """Raise RolloutError: only `update_weights` brings a version to an engine that holds its weights."""
        raise RolloutError(
            f"{self.runner.name} has weights of its own: update_weights brings a version, set_version cannot"
        )

    def update_weights(self, weights: Weights, version: int) -> None:
        """Push all weights and empty the prefix cache. RolloutError while generating, and where they did not
        arrive as sent: the engine then has no version and generates nothing.
        """
        self._ready_for_weights()
        self.runner.push(weights, version)
        self._confirm(version)

    def _ready_for_weights(self) -> None:
        if self._session is not None and not self._session.idle:
            raise RolloutError(
                "update_weights() was called while generate() is running: read its outputs to the end first"
            )
        self.wake_up(["weights"])
        self._pushed = True

    def _confirm(self, version: int) -> None:
        reported = self.runner.version()
        if reported != version:
            raise RolloutError(
                f"weights of version {version} were pushed to {self.runner.name}, which says it has version "
                f"{reported}"
            )

    def sleep(self, level: int = 1) -> None:
        """Give memory back: the cache, and the weights, which level 1 keeps on the CPU and level 2 drops."""
        self._check_free("sleep()")
        whole = self._sleeping == PARTS
        if not self.frees_cache or (whole and self._level >= level):
            return
        if str(self._facts["device"]).startswith("cpu"):
            if not self._said_nothing_sleeps:
                logger.info("%s runs on the CPU, where it cannot sleep: its cache stays", self.runner.name)
            self._said_nothing_sleeps = True
            return
        # a dead engine holds no memory, and the next call reports its death
        with contextlib.suppress(EngineDied):
            if not whole:  # vLLM takes no order to sleep while a part of it sleeps
                self.wake_up()
            self.runner.sleep(level)
            self._level = level
            self._sleeping = PARTS

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, for some of `PARTS`; vLLM would map that of a part that is awake twice."""
        wanted = [part for part in self._sleeping if tags is None or part in tags]
        if wanted:
            self.runner.wake_up(wanted)
            self._sleeping = tuple(part for part in self._sleeping if part not in wanted)

    def close(self) -> None:
        """End the engine's processes."""
        self.runner.close()

    def _new_session(self, closed: bool) -> PushedSession:
        return PushedSession(
            self.runner,
            self._stats,
            problem=self._problem,
            submission=self._submission,
            version=lambda: self.policy_version,
            closed=self._closed,
        )

    def _submission(self, request: GenerationRequest) -> Submission:
        rest = rest_of(request)
        return Submission(rest.request_id, rest.prompt_token_ids, self.params(rest))

    def _problem(self, request: GenerationRequest) -> str | None:
        facts = self._facts
        problem = request_problem(request, vocabulary=facts["vocabulary"], positions=facts["positions"])
        return problem or rest_problem(request) or self.cannot(rest_of(request))

    @abstractmethod
    def cannot(self, request: GenerationRequest) -> str | None:
        """Return why this engine cannot serve a request that other engines can, or None."""

    @abstractmethod
    def params(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the request's sampling parameters by the engine's own names."""


@dataclass
class _ResponseRow:
    """A response so far, of which the request itself has what was begun."""

    request: GenerationRequest
    version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)

    def add(self, piece: ResponsePiece) -> None:
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
    """An `EngineSession` over an `EngineRunner`. The engine's process is asked for its version when a request
    joins and none runs; while requests run, no weights are pushed.
    """

    runner: EngineRunner
    stats: RolloutStats
    problem: Callable[[GenerationRequest], str | None]
    submission: Callable[[GenerationRequest], Submission]
    version: Callable[[], int]
    closed: Callable[[], None]

    def __post_init__(self) -> None:
        self._rows: dict[int, _ResponseRow] = {}
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
        """Hand requests to the engine; those that cannot be served come back at once. RolloutError for an id
        that is in use, and without weights; EngineDied where it is dead.
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
        self._rows |= {request.request_id: _ResponseRow(request, self._version) for request in good}
        self.stats.prefill_tokens += sum(len(context) for context in {one.context for one in good})
        self.stats.max_rows = max(self.stats.max_rows, len(self._rows))
        if good:
            self.runner.start([self.submission(request) for request in good])
        self.stats.seconds += perf_counter() - began
        return outputs

    def step(self) -> list[GenerationOutput]:
        """Wait a while for the next pieces, and return the outputs that are finished by them; EngineDied when
        the engine dies.
        """
        began = perf_counter()
        pieces = self.runner.poll()
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
        """Abort running requests, and release the engine for other uses."""
        self.abort(list(self._rows))
        self.closed()
