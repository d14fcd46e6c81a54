"""PF-PPO's draw: the right odds, from the generator alone, and no crash where no row has a weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from hybridflow.algorithms.resampling import resample_rows
from hybridflow.errors import ConfigError


def shares(scores: list[float], method: str, weight_pow: float = 2.0, rounds: int = 4000) -> list[float]:
    """How often each row is drawn, of all draws."""
    generator, counted = torch.Generator().manual_seed(7), Counter[int]()
    for _ in range(rounds):
        counted.update(
            resample_rows(
                torch.tensor(scores), method=method, weight_pow=weight_pow, generator=generator
            ).tolist()
        )
    assert sum(counted.values()) == rounds * len(scores)
    return [counted[i] / (rounds * len(scores)) for i in range(len(scores))]


@pytest.mark.parametrize(
    ("scores", "method", "weight_pow", "weights"),
    [
        ([1.0, -2.0, 0.0, 3.0], "pow", 2.0, [1, 4, 0, 9]),
        ([1.0, -2.0, 0.0, 3.0], "pow", 1.0, [1, 2, 0, 3]),
        ([1.0, -2.0, 0.0, 3.0], "pow", 0.0, [1, 1, 1, 1]),
        ([1e30, 2e30], "pow", 40.0, [1, 2**40]),  # neither overflows
        ([1e-30, 2e-30], "pow", 2.0, [1, 4]),  # nor vanishes
        ([1.0, 0.0, 0.5, 1.0], "max_min", 2.0, [1, 1, 0, 1]),
        ([1.0, 0.0, 0.5, 1.0], "max_random", 2.0, [4, 1, 1, 4]),
    ],
)
def test_odds(scores: list[float], method: str, weight_pow: float, weights: list[float]) -> None:
    found = shares(scores, method, weight_pow)
    assert found == pytest.approx([w / sum(weights) for w in weights], abs=0.02)
    assert all(share == 0 for share, weight in zip(found, weights, strict=True) if weight == 0)


@pytest.mark.parametrize(
    ("method", "weigh"),
    [
        ("pow", lambda s, scores: abs(s) ** 1.5),
        ("max_min", lambda s, scores: float(s in (max(scores), min(scores)))),
        ("max_random", lambda s, scores: 0.4 if s == max(scores) else 0.1),
    ],
)
def test_the_draw_of_a_step_over_the_rows_of_several_steps(
    method: str, weigh: Callable[[float, list[float]], float]
) -> None:
    """The weights, one by one in float64, are over all steps; the number of draws is that of one."""
    steps = [[0.5, -2.0, 1.0], [3.0, 0.25, -0.5], [3.0, -2.0, 0.0]]
    scores = [score for step in steps for score in step]
    weights = torch.tensor([weigh(score, scores) for score in scores], dtype=torch.float64)
    if method == "pow":
        weights = torch.tensor([weigh(score / 3.0, scores) for score in scores], dtype=torch.float64)
    for seed in range(200):
        found = resample_rows(
            torch.tensor(scores, dtype=torch.float64),
            method=method,
            weight_pow=1.5,
            generator=torch.Generator().manual_seed(seed),
            num_draws=3,
        )
        rng = torch.Generator().manual_seed(seed)
        assert found.tolist() == torch.multinomial(weights, 3, replacement=True, generator=rng).tolist()


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_rows_without_a_weight_are_drawn_evenly(method: str) -> None:
    assert shares([0.0, 0.0, 0.0], method) == pytest.approx([1 / 3] * 3, abs=0.02)


def test_the_generator_decides_and_nothing_else() -> None:
    scores = torch.arange(64.0)

    def draw(seed: int) -> list[int]:
        rows = resample_rows(
            scores, method="pow", weight_pow=2.0, generator=torch.Generator().manual_seed(seed)
        )
        assert rows.dtype == torch.int64 and rows.shape == (64,)
        return rows.tolist()

    state = torch.random.get_rng_state()
    first = draw(1)
    torch.manual_seed(99)
    assert draw(1) == first != draw(2)
    assert len(set(first)) < 64  # with replacement
    torch.random.set_rng_state(state)
    draw(3)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_any_kind_of_score(dtype: torch.dtype) -> None:
    rows = resample_rows(
        torch.tensor([0, 0, 5]).to(dtype), method="pow", weight_pow=2.0, generator=torch.Generator()
    )
    assert rows.tolist() == [2, 2, 2]


def test_no_rows() -> None:
    assert resample_rows(
        torch.zeros(0), method="max_min", weight_pow=2.0, generator=torch.Generator()
    ).shape == (0,)


def test_another_method_is_named() -> None:
    with pytest.raises(ConfigError, match="reweight_method 'best': choose from pow, max_min, max_random"):
        resample_rows(torch.ones(2), method="best", weight_pow=2.0, generator=torch.Generator())
