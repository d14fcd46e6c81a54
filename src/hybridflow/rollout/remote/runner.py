"""Interface between `PushedEngine` and an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hybridflow.errors import RolloutError
from hybridflow.weight_sync.wire.receiver import Weights


class EngineDied(RolloutError):
    """The engine is gone; the message names the engine and the cause."""


@dataclass
class ResponsePiece:
    """The new part of one response."""

    request_id: int
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    """Log-prob of each token, in nats."""
    top: Sequence[list[tuple[int, float]]] = ()
    """For each token the most probable tokens at its place, (id, log-prob), if they were asked for."""
    finish: Literal["stop", "length", "error"] | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @classmethod
    def failed(cls, request_id: int, error: str) -> ResponsePiece:
        """Return the end of a response that failed."""
        return cls(request_id, finish="error", error=error)


@dataclass(frozen=True)
class Submission:
    """A request, translated for the engine."""

    request_id: int
    prompt: Sequence[int]
    params: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters by the engine's own names, all JSON."""


class EngineRunner(Protocol):
    """A running engine. One thread calls it; `abort` may come from another."""

    @property
    def name(self) -> str:
        """The engine's name for messages."""

    def facts(self) -> dict[str, Any]:
        """Return facts about the engine: at least "device", "vocabulary" and "positions"."""

    def version(self) -> int:
        """Return the version of the weights in the engine's own process, the lowest of its workers."""

    def start(self, submissions: Sequence[Submission]) -> None:
        """Begin these requests; raises EngineDied."""

    def poll(self) -> list[ResponsePiece]:
        """Return the next pieces, or none after a while; raises EngineDied."""

    def abort(self, request_ids: Iterable[int]) -> None:
        """Stop these requests; no piece of theirs comes any more."""

    def push(self, weights: Weights, version: int) -> None:
        """Push weights to all workers and empty the prefix cache; RolloutError where they did not arrive."""

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again; `tags` names its parts."""

    def close(self) -> None:
        """End the processes that were started for the engine."""
