"""An engine with weights of its own as a `RolloutEngine`: the same requests and outputs as the native engine.

requests ──check──► errors (that request only)
    └──► Runner ──pieces──► rows ──► outputs, as they finish; those that were not done when the engine died:
    errors that name it
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.push.receiver import NOTHING, Weights
from hybridflow.rollout.remote.runner import EngineDied, Runner, Submission
from hybridflow.rollout.remote.session import PushedSession
from hybridflow.rollout.requests import request_problem, rest_of, rest_problem
from hybridflow.rollout.session_engine import SessionEngine

logger = logging.getLogger(__name__)

PARTS = ("weights", "kv_cache")
"""What an engine's memory holds, by the names that vLLM and SGLang use."""


class PushedEngine(SessionEngine):
    """A `RolloutEngine` over a `Runner`; a subclass translates requests for its engine.

    Its weights come by `update_weights` only; before the first push it refuses to generate. `frees_cache`:
    `sleep` gives memory back (`rollout.free_cache_engine`). `texts`: the engine has a tokenizer.
    """

    def __init__(
        self, runner: Runner, *, eos_token_ids: Sequence[int], frees_cache: bool = True, texts: bool = True
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
        """Whether a part of its memory was given back."""
        return bool(self._sleeping)

    def set_version(self, version: int) -> None:
        """Raise RolloutError: only `update_weights` brings a version to an engine with weights of its own."""
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
