"""From the `reward.*` keys to a RewardManager, which may keep outcomes: an equal request is not scored again.

add(request) ─► known? ─► its outcome            else ─► scorer ─► outcome, kept unless it is an error

The reward function is loaded here, so a wrong one shows before a model is allocated.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from functools import partial

from hybridflow.config.reward import RewardConfig
from hybridflow.config.source_code import in_memory
from hybridflow.rewards.compose import describe, resolve
from hybridflow.rewards.manager import RewardManager
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
        self._keys: list[bytes] = []
        """Of each request."""
        self._begun: dict[bytes, None] = {}
        """Keys of the requests that the scorer has."""
        self._known: dict[bytes, Outcome] = {}

    def add(self, request: ScoreRequest) -> None:
        try:
            payload = pickle.dumps(request)
        except Exception:  # whatever the rows of a dataset hold: such a row equals no other, of no step
            payload = os.urandom(16)
        key = hashlib.blake2b(payload, digest_size=16).digest()
        if key not in self._known and key not in self._begun:
            if found := self._cache.find(key):
                self._known[key] = found
            else:
                self._begun[key] = None
                self._inner.add(request)
        self._keys.append(key)

    def outcomes(self) -> list[Outcome]:
        scored = dict(zip(self._begun, self._inner.outcomes(), strict=True))
        for key, outcome in scored.items():
            self._cache.keep(key, outcome)
        outcomes = []
        for key in self._keys:
            outcomes.append(self._known.get(key) or scored[key])
            self._known[key] = replace(outcomes[-1], seconds=0.0, tries=0)
        return outcomes

    def close(self) -> None:
        self._inner.close()


def build_reward_manager(config: RewardConfig, seed: int) -> RewardManager:
    """Load the reward function that the configuration chooses and start the processes that call it.

    Raises ConfigError if it cannot be found, imported or called as reward functions are, RewardError if a
    built-in one needs an extra that is not installed or a worker does not start.
    """
    scorer: Scorer
    if config.num_workers > 0:
        from hybridflow.rewards.pool import RewardPool

        scorer = RewardPool(config, seed)
    else:
        from hybridflow.rewards.in_process import InProcessScorer

        scorer = InProcessScorer(partial(resolve, config, seed), config.timeout)
    if config.cache_size:
        scorer = CachedScorer(scorer, config.cache_size)
    names = [config.function, *(str(term.get("name")) for term in config.terms)]
    return RewardManager(
        scorer,
        on_error=config.on_error,
        function=describe(config),
        has_file=not any(map(in_memory, names)),
    )
