"""mean@n, best@k and maj@k by exact enumeration, and that they are the same twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from hybridflow.trainer.ppo.validation import validation_metrics

NAN = float("nan")


def metrics(
    values: Sequence[Any],
    predictions: Sequence[Any] | None = None,
    n: int = 4,
    seed: int = 0,
    **more: Sequence[Any],
) -> dict[str, float]:
    uids = [f"p{row // n}" for row in range(len(values))]
    return validation_metrics(
        ["math"] * len(values), uids, {"reward": values, **more}, predictions, seed=seed
    )


def expectation(scores: Sequence[float], k: int, of: Callable[[tuple[int, ...]], float]) -> float:
    """The exact mean over all ordered draws with replacement."""
    draws = list(product(range(len(scores)), repeat=k))
    return sum(of(draw) for draw in draws) / len(draws)


def test_one_response_has_only_a_mean() -> None:
    assert metrics([1.0, 0.0, 1.0, 1.0], n=1) == {"val-core/math/reward/mean@1": 0.75}


def test_mean_and_deviation_over_prompts_by_hand() -> None:
    found = metrics([1, 0, 0, 1, 1, 1, 1, 1])
    assert found["val-core/math/reward/mean@4"] == 0.75
    assert found["val-core/math/reward/std@4"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert {name.rsplit("/", 2)[1] for name in found if "@" in name.rsplit("/", 2)[1]} == {
        "best@2",
        "best@4",
        "worst@2",
        "worst@4",
    }


@pytest.mark.parametrize("k", [2, 4])
def test_best_worst_and_majority_are_the_exact_expectations(k: int) -> None:
    scores, answers = [0.2, 1.0, 0.0, 0.2], ["7", "9", "8", "7"]

    def majority(draw: tuple[int, ...]) -> float:
        winner = Counter(answers[row] for row in draw).most_common(1)[0][0]  # equal counts: the one met first
        return next(scores[row] for row in draw if answers[row] == winner)

    found = metrics(scores * 30, answers * 30)  # thirty prompts: 30,000 draws
    for name, exact in (
        ("best", expectation(scores, k, lambda draw: max(scores[row] for row in draw))),
        ("worst", expectation(scores, k, lambda draw: min(scores[row] for row in draw))),
        ("maj", expectation(scores, k, majority)),
    ):
        assert found[f"val-core/math/reward/{name}@{k}/mean"] == pytest.approx(exact, abs=0.015), name


def test_certain_cases() -> None:
    unanimous = metrics([0, 0, 0, 0], ["7"] * 4)
    assert (
        unanimous["val-core/math/reward/maj@4/mean"] == 0.0
        and unanimous["val-core/math/reward/best@4/mean"] == 0.0
    )
    assert metrics([1, 1, 1, 1], [7, 7, 7, 7])["val-core/math/reward/maj@2/mean"] == 1.0
    assert not any("maj" in name for name in metrics([1, 0, 1, 0]))


def test_sizes_are_powers_of_two_and_n_itself() -> None:
    found = metrics([1, 0, 1, 0, 1, 0], n=6)
    assert {name for name in found if "best" in name} == {
        f"val-core/math/reward/best@{k}/mean" for k in (2, 4, 6)
    }


def test_draws_are_keyed_by_the_seed() -> None:
    values = [1, 0, 0, 0, 0.5, 0, 0, 1]
    assert metrics(values) == metrics(values)
    assert metrics(values, seed=1) != metrics(values)


def test_acc_is_the_core_where_a_source_has_it() -> None:
    """Sources have different extra keys; a row without one counts 0, a source without one has no such
    metric.
    """
    found = validation_metrics(
        ["math", "math", "code", "code"],
        ["a", "b", "c", "d"],
        {
            "reward": [1.0, 0.0, 0.5, 0.5],
            "acc": [1.0, NAN, None, None],
            "pred": ["4", None, None, None],
            "passed": [None, None, True, False],
        },
        None,
        seed=0,
    )
    assert found == {
        "val-aux/math/reward/mean@1": 0.5,
        "val-core/math/acc/mean@1": 0.5,
        "val-core/code/reward/mean@1": 0.5,
        "val-aux/code/passed/mean@1": 0.5,
    }


def test_groups_of_different_sizes() -> None:
    found = validation_metrics(["m"] * 3, ["a", "a", "b"], {"reward": [1, 0, 1]}, None, seed=0)
    assert found["val-core/m/reward/mean@2"] == 0.5 and found["val-core/m/reward/mean@1"] == 1.0
