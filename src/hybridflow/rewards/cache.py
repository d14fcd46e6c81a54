"""Outcomes that are kept: a request that equals an earlier one is not scored again.

add(request) ─► known? ─► its outcome            else ─► scorer ─► outcome, kept unless it is an error
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from dataclasses import replace

from hybridflow.rewards.request import OpenScoring, Outcome, Scorer, ScoreRequest


class CachedScorer:
    """Keeps the newest `size` outcomes of one reward function, for as long as the run's process lives.

    Requests are equal where all is equal that the function is given, so its prompt's row as well.
    """

    def __init__(self, scorer: Scorer, size: int) -> None:
        self._scorer = scorer
        self._size = size
        self._kept: OrderedDict[bytes, Outcome] = OrderedDict()

    def open(self) -> OpenScoring:
        return _CachedScoring(self._scorer.open(), self)

    def close(self) -> None:
        self._scorer.close()

    def find(self, key: bytes) -> Outcome | None:
        """Return a kept outcome, which now is the newest one."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: bytes, outcome: Outcome) -> None:
        """Keep an outcome, and forget the oldest one where there are too many."""
        if not outcome.error:
            self._kept[key] = replace(outcome, seconds=0.0, tries=0)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)


class _CachedScoring:
    def __init__(self, inner: OpenScoring, cache: CachedScorer) -> None:
        self._inner = inner
        self._cache = cache
        self._begun: dict[bytes, int] = {}
        """Numbers of the requests that the scorer has, by their keys."""
        self._results: list[Outcome | bytes] = []
        """For each request its kept outcome, or the key of what the scorer has."""

    def add(self, request: ScoreRequest) -> None:
        try:
            payload = pickle.dumps(request)
        except Exception:  # whatever the rows of a dataset hold: such a row equals no other, of no step
            payload = os.urandom(16)
        key = hashlib.blake2b(payload, digest_size=16).digest()
        found = self._cache.find(key)
        if found is None and key not in self._begun:
            self._begun[key] = len(self._begun)
            self._inner.add(request)
        self._results.append(found or key)

    def outcomes(self) -> list[Outcome]:
        scored = self._inner.outcomes()
        for key, number in self._begun.items():
            self._cache.keep(key, scored[number])
        outcomes: list[Outcome] = []
        new = set(self._begun)
        for result in self._results:
            if isinstance(result, Outcome):
                outcomes.append(result)
                continue
            outcome = scored[self._begun[result]]
            if result not in new:
                outcome = replace(outcome, seconds=0.0, tries=0)
            new.discard(result)
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        self._inner.close()
