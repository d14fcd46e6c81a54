"""The timeline of a trajectory, as spans for viewers of traces.

    trajectory
    ├── turn ── generate, tool, tool, …
    ├── turn ── generate, environment
    └── reward

Code that waits for something notes it in the trajectory's `SpanLog`; `episodes/rollout_traces.py` makes the
tree, and `observability/tracing.py` sends it away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

SpanName = Literal["trajectory", "turn", "generate", "tool", "environment", "reward"]
Attribute = str | bool | int | float


@dataclass(frozen=True)
class TraceSpan:
    """A part of a trajectory, from `start` to `end` in seconds since the epoch."""

    name: SpanName
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    texts: Mapping[str, str | Sequence[int]] = field(default_factory=dict)
    """Texts that were read and written in it, or their token ids; sent only where a run asks for texts."""
    error: str = ""
    """Reason of its failure; empty where it has not failed."""
    children: tuple[TraceSpan, ...] = ()


@dataclass
class NotedSpan:
    """An open span, whose attributes and texts are still being filled in."""

    attributes: dict[str, Attribute]
    texts: dict[str, str | Sequence[int]] = field(default_factory=dict)
    error: str = ""


class SpanLog:
    """The spans of one trajectory, in the order of their ends. It belongs to one event loop."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    @contextmanager
    def span(self, name: SpanName, **attributes: Attribute) -> Iterator[NotedSpan]:
        """Note what happens in this context; an exception that leaves it is the span's error."""
        noted = NotedSpan(attributes)
        start = time.time()
        try:
            yield noted
        except BaseException as error:
            noted.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            span = TraceSpan(name, start, time.time(), noted.attributes, noted.texts, noted.error)
            self.spans.append(span)
