"""An engine with weights of its own as a `RolloutEngine`: the same requests and outputs as the native engine.

requests ──check──► errors (that request only)
    └──► Runner ──pieces──► rows ──► outputs, as they finish; those that were not done when the engine died:
    errors that name it
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    RolloutStats,
    TopTokens,
)
from hybridflow.rollout.push.receiver import NOTHING
from hybridflow.rollout.remote.runner import EngineDied, Piece, Runner, Submission
from hybridflow.rollout.requests import check_ids, refused, request_problem, rest_of, rest_problem, whole_of

logger = logging.getLogger(__name__)

PARTS = ("weights", "kv_cache")
"""What an engine's memory holds, by the names that vLLM and SGLang use."""


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

    def abandoned(self, error: str | None = None) -> GenerationOutput:
        """Return the tokens so far, as aborted or, with `error`, as lost."""
        if error is None:
            return self._output("abort")
        return self._output("error", f"request {self.request.request_id}: {error}")

    def done(self, piece: Piece) -> GenerationOutput:
        """Return the whole output, of which `piece` is the last part."""
        if piece.finish == "error":
            return self.abandoned(piece.error)
        assert piece.finish is not None
        return self._output(piece.finish, stop_reason=piece.stop_reason)

    def _output(
        self, reason: FinishReason, error: str | None = None, stop_reason: int | str | None = None
    ) -> GenerationOutput:
        versions = [self.version] * len(self.token_ids)
        number = self.request.request_id
        rest = GenerationOutput(
            number, self.token_ids, self.log_probs, reason, versions, error, stop_reason, self.top
        )
        return whole_of(self.request, rest)


class PushedEngine(ABC):
    """A `RolloutEngine` over a `Runner`; a subclass translates requests for its engine.

    Its weights come by `update_weights` only; before the first push it refuses to generate.

    `frees_cache`: `sleep` gives memory back (`rollout.free_cache_engine`). `texts`: the engine has a
    tokenizer.
    """

    def __init__(
        self, runner: Runner, *, eos_token_ids: Sequence[int], frees_cache: bool = True, texts: bool = True
    ) -> None:
        self.runner = runner
        self.frees_cache = frees_cache
        self.texts = texts
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        try:
            self._facts = runner.facts()
        except BaseException:  # what was started for it would outlive it
            runner.close()
            raise
        self._stats = RolloutStats()
        self._running: dict[int, _Row] = {}
        self._busy = self._pushed = False
        self._level = 0
        self._asleep: tuple[str, ...] = ()
        self._said_nothing_sleeps = False

    @property
    def policy_version(self) -> int:
        """Version of the weights, as the engine's own process reports it.

        -1 before this run's first whole push, whatever another run has pushed.
        """
        if not self._pushed:
            return NOTHING
        return self.runner.version()

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the newest `generate`, up to now."""
        return self._stats

    def set_version(self, version: int) -> None:
        """Raise RolloutError: only `update_weights` brings a version to an engine with weights of its own."""
        raise RolloutError(
            f"{self.runner.name} has weights of its own: update_weights brings a version, set_version cannot"
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push all weights, by the names of the model's files, and empty the prefix cache.

        RolloutError while generating, and where they did not arrive as sent: the engine then has no version
        and generates nothing.
        """
        self._ready_for_weights()
        self.runner.push(weights, version)
        self._confirm(version)

    def _ready_for_weights(self) -> None:
        if self._busy:
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
        """Give memory back.

        Level 1 frees the cache and moves the weights to the CPU; level 2 drops the weights, which must then
        be pushed again.
        """
        if self._busy:
            raise RolloutError(
                "sleep() was called while generate() is running: read its outputs to the end first"
            )
        if not self.frees_cache or (self._asleep and self._level >= level):
            return
        if str(self._facts["device"]).startswith("cpu"):
            if not self._said_nothing_sleeps:
                logger.info("%s runs on the CPU, where it cannot sleep: its cache stays", self.runner.name)
            self._said_nothing_sleeps = True
            return
        # a dead engine holds no memory, and the next call reports its death
        with contextlib.suppress(EngineDied):
            self.runner.sleep(level)
            self._level = level
            self._asleep = PARTS

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again; `tags`: only some of `PARTS`. Parts that are awake are left alone: vLLM would
        map their memory a second time.
        """
        wanted = [part for part in self._asleep if tags is None or part in tags]
        if wanted:
            self.runner.wake_up(wanted)
            self._asleep = tuple(part for part in self._asleep if part not in wanted)

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests of the running `generate` and return their partial responses."""
        rows = [
            row for request_id in set(request_ids) if (row := self._running.pop(request_id, None)) is not None
        ]
        if rows:
            self.runner.abort([row.request.request_id for row in rows])
        return [row.abandoned() for row in rows]

    def close(self) -> None:
        """End the engine's processes."""
        self.runner.close()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Yield one output for each request, as they finish.

        A request that cannot be served gives reason "error" and the others go on; when the engine dies, so do
        all that are not done, with what they had. RolloutError without weights, when asleep, and for a second
        call while one is running.
        """
        if self._busy:
            raise RolloutError(
                "generate() was called while another one is running: read its outputs to the end first"
            )
        if self._asleep:
            raise RolloutError("generate() was called on a sleeping engine: call wake_up() first")
        check_ids(requests)
        self._stats = RolloutStats()
        return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        if not requests:
            return
        if self._busy:  # both were asked for before either began
            raise RolloutError(
                "generate() was called while another one is running: read its outputs to the end first"
            )
        version = self.policy_version
        if version == NOTHING:
            raise RolloutError(
                f"{self.runner.name} has no weights yet, or only a part of a push came: update_weights must "
                "come first"
            )
        began = time.perf_counter()
        good = []
        for request in requests:
            problem = self._problem(request)
            if problem is not None:
                yield refused(request, problem)
            else:
                good.append(request)
        self._running = {request.request_id: _Row(request, version) for request in good}
        self._stats.prefill_tokens = sum(len(context) for context in {request.context for request in good})
        self._stats.max_rows = len(good)
        self._busy = True
        try:
            rests = [rest_of(request) for request in good]
            yield from self._answers(
                [Submission(rest.request_id, rest.prompt_token_ids, self.params(rest)) for rest in rests]
            )
        finally:
            self._stats.seconds = time.perf_counter() - began
            if self._running:  # the caller read no further
                self.runner.abort(list(self._running))
            self._running = {}
            self._busy = False

    def _answers(self, submissions: Sequence[Submission]) -> Iterator[GenerationOutput]:
        try:
            self.runner.start(submissions)
            while self._running:
                pieces = self.runner.poll()
                self._stats.decode_steps += 1
                done = []
                # all of them before anything is yielded: the reader may abort a row, and gets what it has
                for piece in pieces:
                    row = self._running.get(piece.request_id)
                    if row is None:  # aborted meanwhile
                        continue
                    row.add(piece)
                    self._stats.generated_tokens += len(piece.token_ids)
                    if piece.finish is not None and self._running.pop(piece.request_id, None) is not None:
                        done.append(row.done(piece))
                yield from done
        except EngineDied as error:
            lost = list(self._running.values())
            self._running = {}
            yield from (row.abandoned(str(error)) for row in lost)

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
