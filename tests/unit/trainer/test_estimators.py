"""pass@k, maj@k and intervals against enumeration and figures worked out by hand."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.trainer.evaluation.estimators import (
    MAX_SUBSETS,
    expected_best,
    expected_majority,
    interval,
    majority_is_exact,
)


def test_pass_at_k_is_the_unbiased_estimator_by_hand() -> None:
    # 3 of 8 right: 1 − C(5, 4)/C(8, 4) = 1 − 5/70
    assert expected_best([1, 0, 0, 1, 0, 0, 1, 0], 4) == pytest.approx(65 / 70)


@given(st.integers(1, 200), st.data())
def test_pass_at_k_is_one_minus_the_sets_without_a_right_answer(n: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    scores = [1.0] * right + [0.0] * (n - right)
    assert expected_best(scores, k) == pytest.approx(1 - comb(n - right, k) / comb(n, k))


@pytest.mark.parametrize("score", [0.1, 0.3, 1.0])
def test_the_best_of_equal_scores_is_that_score(score: float) -> None:
    assert all(expected_best([score] * n, k) == score for n in range(1, 40) for k in range(1, n + 1))


@given(st.lists(st.tuples(st.floats(-2, 2), st.sampled_from("abc")), min_size=1, max_size=6), st.data())
def test_best_and_majority_are_means_over_all_sets(
    rows: list[tuple[float, str]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rows)))
    sets = list(combinations(rows, k))
    best = sum(max(score for score, _ in chosen) for chosen in sets) / len(sets)

    def majority(chosen: tuple[tuple[float, str], ...]) -> float:
        counts = Counter(answer for _, answer in chosen)
        won = [score for score, answer in chosen if counts[answer] == max(counts.values())]
        return sum(won) / len(won)

    scores = [score for score, _ in rows]
    assert expected_best(scores, k) == pytest.approx(best, abs=1e-12)
    expected = sum(map(majority, sets)) / len(sets)
    assert expected_majority(scores, [answer for _, answer in rows], k, 0) == pytest.approx(
        expected, abs=1e-12
    )


def test_a_majority_over_too_many_sets_is_drawn_and_keyed_by_the_seed() -> None:
    assert comb(24, 8) > MAX_SUBSETS and not majority_is_exact(24, 8) and majority_is_exact(8, 4)
    scores = [1.0] * 14 + [0.0] * 10
    answers = ["7"] * 14 + ["8"] * 10
    sets = comb(24, 8)
    exact = sum(comb(14, right) * comb(10, 8 - right) * (right > 4) / sets for right in range(9))
    exact += comb(14, 4) * comb(10, 4) / sets / 2  # a tie
    found = expected_majority(scores, answers, 8, seed=3)
    assert found == pytest.approx(exact, abs=0.04)
    assert (
        found
        == expected_majority(scores, answers, 8, seed=3)
        != expected_majority(scores, answers, 8, seed=4)
    )


def test_intervals_of_shares_are_wilsons_and_count_prompts() -> None:
    low, high = interval([1.0] * 8 + [0.0] * 2) or (0, 0)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval([0.0] * 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    # eight answers to each of ten prompts that are all right or all wrong tell no more than ten answers do
    assert interval([float(np.mean([right] * 8)) for right in [1] * 8 + [0] * 2]) == (low, high)


def test_equal_shares_have_the_interval_of_as_many_prompts() -> None:
    found = interval([0.3] * 10)
    assert found == pytest.approx(interval([1.0] * 3 + [0.0] * 7), abs=1e-9)


def test_intervals_of_other_numbers_are_normal() -> None:
    low, high = interval([1.0, 2.0, 3.0]) or (0, 0)
    assert (low + high) / 2 == pytest.approx(2.0)
    assert (high - low) / 2 == pytest.approx(1.959964 / 3**0.5)
    assert interval([3.0]) is None
