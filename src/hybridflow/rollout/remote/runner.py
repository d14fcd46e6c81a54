"""Interface between `PushedEngine` and an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hybridflow.errors import RolloutError, WorkerLost
from hybridflow.weight_sync.wire.receiver import NOTHING, Part, Weights


class EngineDied(RolloutError, WorkerLost):
    """The engine is gone with the weights and the responses that it held; the message names the engine and
    the cause.
    """


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


class Follower(EngineRunner):
    """The engine of a replica as its other ranks have it: the first one started it and sends it requests.

    They take part where ranks read sharded weights together, and keep nothing of what they read.
    """

    name = "the engine of another rank"

    def __init__(self, device: str, *, adapters: bool = False) -> None:
        self._facts = {"device": device, "vocabulary": 0, "positions": 0, "adapters": adapters}
        self._version = NOTHING
        self._has_base = False

    def facts(self) -> dict[str, Any]:
        """Return that no request can be served here."""
        return {**self._facts, "quantized": True, "max_log_probs": 0, "temperature_only": True}

    def version(self) -> int:
        """Return the version of the weights that this rank read last."""
        return self._version

    def has_base(self) -> bool:
        """Return whether this rank has read base weights for adapters."""
        return self._has_base

    def start(self, submissions: Sequence[Submission]) -> None:
        """Raise RolloutError for any request."""
        if submissions:
            raise RolloutError("the first rank of a replica serves its requests: send them there")

    def poll(self) -> list[ResponsePiece]:
        """Return nothing."""
        return []

    def abort(self, request_ids: Iterable[int]) -> None:
        """Nothing runs."""

    def push(
        self, weights: Weights, version: int, part: Part = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        """Read the weights with the other ranks."""
        for _ in weights:
            pass
        self._has_base = part != "whole"
        self._version = version

    def sleep(self, level: int) -> None:
        """Forget the version where the engine forgets its weights."""
        if level > 1:
            self._version = NOTHING
            self._has_base = False

    def wake_up(self, tags: Sequence[str]) -> None:
        """There is no memory to take."""

    def close(self) -> None:
        """There is no process to end."""
