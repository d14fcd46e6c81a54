"""How long responses are: a mean, a limit and a tail between, or lengths that were seen.

Lengths ──segments──► how many of the rows still run, stretch by stretch of tokens

Decoding reads the weights once for a token of all rows that run, so the few long rows of a batch cost as much
time as all of them together; the tail is what a mean hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

SPREAD = 0.7
"""Standard deviation of the logarithm of a length where nothing else is known."""
_POINTS = [(index + 0.5) / 128 for index in range(128)]
_NORMAL = [NormalDist().inv_cdf(point) for point in _POINTS]


class Segment(NamedTuple):
    """A stretch of decode steps in which about as many rows run."""

    begins: float
    """Tokens of a response at its begin."""
    ends: float
    rows: float


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses in tokens: log-normal with this mean, cut at the limit."""

    mean: float
    limit: float
    spread: float = SPREAD
    seen: tuple[float, ...] = ()
    """Lengths that were seen, in ascending order; they take the place of the distribution."""

    @classmethod
    def of(cls, lengths: Sequence[float]) -> Lengths:
        """Return the lengths of a batch that is there."""
        ordered = tuple(sorted(lengths))
        return cls(sum(ordered) / len(ordered), ordered[-1], seen=ordered)

    @cached_property
    def _middle(self) -> float:
        """The mean of the logarithm with which the cut distribution has the wanted mean, by bisection."""
        low = math.log(max(self.mean, 1.0)) - self.spread**2 - 1.0
        high = math.log(self.limit) + 8 * self.spread + 1.0
        for _ in range(50):
            middle = (low + high) / 2
            cut = (min(self.limit, math.exp(middle + self.spread * point)) for point in _NORMAL)
            if sum(cut) / len(_NORMAL) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def quantile(self, part: float) -> float:
        """Return the length that this part of the rows does not pass."""
        if self.seen:
            return self.seen[min(int(part * len(self.seen)), len(self.seen) - 1)]
        if self.mean >= self.limit or self.spread == 0:
            return min(self.mean, self.limit)
        inner = min(max(part, 1e-9), 1 - 1e-9)
        return min(self.limit, math.exp(self._middle + self.spread * NormalDist().inv_cdf(inner)))

    @cached_property
    def square(self) -> float:
        """The mean square of a length."""
        points = self.seen or tuple(self.quantile(point) for point in _POINTS)
        total = 0.0
        for point in points:
            total += point * point
        return total / len(points)

    def segments(self, rows: float) -> Iterator[Segment]:
        """Yield stretches in which the `rows` rows that begin together run, by about a fifth fewer each."""
        begins = 0.0
        running = float(rows)
        while running >= 1:
            after = running * 0.8 if running > 1.5 else 0.0
            ends = self.quantile(1 - max(after, 0.5) / rows)
            if ends > begins:
                yield Segment(begins, ends, (running + after) / 2 if after else running)
                begins = ends
            running = after
