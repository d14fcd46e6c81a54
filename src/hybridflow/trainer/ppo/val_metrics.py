"""Validation numbers by data source: mean@n, best@k and maj@k with a seeded bootstrap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridflow.protocol.randomness import derive_seed

NUM_BOOTSTRAP = 1000


def validation_metrics(
    sources: Sequence[str], uids: Sequence[str], variables: dict[str, Sequence[Any]], predictions: Sequence[Any] | None, *, seed: int
) -> dict[str, float]:
    """Metrics of each data source and variable (`reward`, `acc`, …).

    For n responses of a prompt: `mean@n`; for k = 2, 4, 8, … n: `best@k/mean` and, where there are predictions, `maj@k/mean`, each the
    mean over NUM_BOOTSTRAP draws of k responses with replacement. `acc` is the core variable where there is one, else `reward`.
    """
    result: dict[str, float] = {}
    rows_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        rows_of[source][uid].append(row)
    core = "acc" if "acc" in variables else "reward"
    for source, groups in rows_of.items():
        for name, values in variables.items():
            prefix = f"{'val-core' if name == core else 'val-aux'}/{source}/{name}"
            per_prompt: dict[str, list[float]] = defaultdict(list)
            for number, rows in enumerate(groups.values()):
                scores = np.array([float(values[row]) for row in rows])
                votes = None if predictions is None else [predictions[row] for row in rows]
                for key, value in _prompt_metrics(scores, votes, derive_seed(seed, "bootstrap", number)).items():
                    per_prompt[key].append(value)
            result |= {f"{prefix}/{key}": float(np.mean(entries)) for key, entries in per_prompt.items()}
    return result


def _prompt_metrics(scores: np.ndarray, votes: list[Any] | None, seed: int) -> dict[str, float]:
    n = len(scores)
    metrics = {f"mean@{n}": float(scores.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(scores.std(ddof=1))
    rng = np.random.default_rng(seed)
    for k in _subset_sizes(n):
        draws = rng.integers(0, n, size=(NUM_BOOTSTRAP, k))
        metrics[f"best@{k}/mean"] = float(scores[draws].max(axis=1).mean())
        metrics[f"worst@{k}/mean"] = float(scores[draws].min(axis=1).mean())
        if votes is not None:
            metrics[f"maj@{k}/mean"] = float(np.mean([_majority_score(scores, votes, draw) for draw in draws]))
    return metrics


def _subset_sizes(n: int) -> list[int]:
    sizes = [k for k in (2**power for power in range(1, 20)) if k < n]
    return [*sizes, n]


def _majority_score(scores: np.ndarray, votes: list[Any], draw: np.ndarray) -> float:
    """The score of the answer that most of the drawn responses give; a tie goes to the answer drawn first."""
    counts = Counter(str(votes[index]) for index in draw)
    winner = counts.most_common(1)[0][0]
    return float(next(scores[index] for index in draw if str(votes[index]) == winner))
