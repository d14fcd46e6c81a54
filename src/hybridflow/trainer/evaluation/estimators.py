"""Estimates of best@k and maj@k from the answers to a prompt, with intervals.

scores (and answers) of one prompt ──expected_best, expected_majority──► a number for each prompt ──interval
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

MAX_SUBSETS = 2000
"""Sets of k answers that a majority is computed over; where there are more, as many are drawn."""
NORMAL_QUANTILE = 1.959964
"""Quantile of the standard normal distribution for 95 % of it."""


def subset_sizes(n: int) -> list[int]:
    """Return the k at which n answers are looked at: 2, 4, 8, … and n itself."""
    sizes = [k for k in (2**power for power in range(1, 20)) if k < n]
    return [*sizes, n]


def support(answers: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return for each drawn answer how many of its draw agree with it, itself included.

    answers [n] int has equal numbers for equal answers; draws [D, k] int are places in it; the result is
    [D, k] int.
    """
    given = answers[draws]
    agreeing: np.ndarray = (given[:, :, None] == given[:, None, :]).sum(axis=-1)
    return agreeing


def expected_best(scores: Sequence[float], k: int) -> float:
    """Return the expected highest score of k of the n scores, each set of k being as likely: Σᵢ
    s₍ᵢ₎·C(i−1, k−1)/C(n, k) over the scores in ascending order.

    For scores of 0 and 1, c of them 1, this is the unbiased estimator of pass@k, 1 − C(n−c, k)/C(n, k)
    (Chen et al., 2107.03374). k is at most n.
    """
    sets = math.comb(len(scores), k)
    total = sum(score * (math.comb(place, k - 1) / sets) for place, score in enumerate(sorted(scores)))
    return min(max(total, min(scores)), max(scores))  # rounding may have carried it beyond


def majority_is_exact(n: int, k: int) -> bool:
    """Return whether `expected_majority` looks at every set of k of n answers."""
    return math.comb(n, k) <= MAX_SUBSETS


def expected_majority(scores: Sequence[float], answers: Sequence[str], k: int, seed: int) -> float:
    """Return the expected score of the answer that most of k of the n responses give; where several answers
    are as frequent, each is as likely.

    The mean is over all sets of k, or over MAX_SUBSETS of them that `seed` draws where there are more.
    """
    n = len(scores)
    if majority_is_exact(n, k):
        draws = np.array(list(combinations(range(n), k)))
    else:
        places = np.tile(np.arange(n), (MAX_SUBSETS, 1))
        draws = np.random.default_rng(seed).permuted(places, axis=1)[:, :k]
    agreeing = support(np.unique(list(answers), return_inverse=True)[1], draws)
    wins = agreeing == agreeing.max(axis=1, keepdims=True)
    won = (np.array(scores, dtype=float)[draws] * wins).sum(axis=1) / wins.sum(axis=1)
    return float(won.mean())


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the bounds of a 95 % confidence interval of the mean of one number for each prompt; None where
    there is only one number.

    Prompts are the observations, so answers to one prompt may depend on each other. For numbers in [0, 1] it
    is Wilson's interval with m·(1 − m)/se² observations, which for numbers of 0 and 1 is the number of
    prompts; for others mean ± 1.96·se.
    """
    mean = float(np.mean(values))
    count = len(values)
    if min(values) < 0 or max(values) > 1:
        if count == 1:
            return None
        half = NORMAL_QUANTILE * float(np.std(values, ddof=1)) / math.sqrt(count)
        return mean - half, mean + half
    variance = float(np.var(values)) / count
    observations = float(count)
    if variance > 0 and max(values) > min(values):  # equal values have one by rounding
        observations = mean * (1 - mean) / variance
    square = NORMAL_QUANTILE**2 / observations
    centre = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * (mean * (1 - mean) + square / 4)) / (1 + square)
    return centre - half, centre + half
