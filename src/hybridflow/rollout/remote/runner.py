"""What `PushedEngine` needs of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from hybridflow.errors import RolloutError


class EngineDied(RolloutError):
    """The engine is gone; the text says which, and of what."""


@dataclass
class Piece:
    """What is new of one response."""

    request_id: int
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    """Nats, of the tokens."""
    top: Sequence[list[tuple[int, float]]] = ()
    """For each token, the most probable ones of its place, where asked for."""
    finish: Literal["stop", "length", "error"] | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Submission:
    """A request in the engine's own words."""

    request_id: int
    prompt: Sequence[int]
    params: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters by the engine's own names, all JSON."""


class Runner(Protocol):
    """An engine that answers; one thread calls it, but for `abort`."""

    @property
    def name(self) -> str:
        """Which engine this is, for messages."""
        ...

    def facts(self) -> dict[str, Any]:
        """Of the engine: at least "device", "vocabulary" and "positions"."""
        ...

    def version(self) -> int:
        """That of the weights in the engine's own process, the least over its workers."""
        ...

    def start(self, submissions: Sequence[Submission]) -> None:
        """Begin these; EngineDied."""
        ...

    def poll(self) -> list[Piece]:
        """Wait for what comes next, but not for ever where nothing comes; EngineDied."""
        ...

    def abort(self, request_ids: Iterable[int]) -> None:
        """Stop these; no piece of theirs comes any more."""
        ...

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Weights to all workers, and the prefix cache emptied; RolloutError where they did not arrive."""
        ...

    def sleep(self, level: int) -> None:
        """Give memory back."""
        ...

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory again."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...
