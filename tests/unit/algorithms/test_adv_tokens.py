"""Estimators whose advantage differs from token to token, on cases small enough for paper and pencil."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.on_policy_distillation import on_policy_distillation
from hybridflow.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from hybridflow.algorithms.advantages.prime import prime
from hybridflow.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from hybridflow.algorithms.advantages.remax import remax

NAN = float("nan")
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def table(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def probabilities(*pi: list[float]) -> tuple[Tensor, Tensor]:
    """Log-probs of sampled tokens and Σπ² over two words of which the sampled one is the first."""
    p = table(*pi)
    return p.log(), p.square() + (1 - p).square()


def test_beyond_the_second_longest_row_there_is_no_baseline() -> None:
    log_probs, squares = probabilities([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    rewards = table([0.0, 0.0, 3.0], [0.0, 0.0, NAN], [0.0, NAN, NAN])
    out = optimal_token_baseline(rewards, mask, ids(0, 0, 0), log_probs, squares)
    # equal weights: the mean of the rows that are there; the last token of the longest row keeps its whole
    # return
    torch.testing.assert_close(
        out.advantages, table([2.0, 1.5, 3.0], [-1.0, -1.5, 0.0], [-1.0, 0.0, 0.0]), **CLOSE
    )


def test_certain_tokens_are_compared_with_the_plain_mean() -> None:
    ones, mask = torch.ones(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.bool)
    out = optimal_token_baseline(table([4.0], [0.0]), mask, ids(0, 0), ones.log(), ones)
    assert out.advantages.tolist() == [[2.0], [-2.0]]


def test_weights_that_round_below_zero_count_as_zero() -> None:
    # 2e-7 and −1e-7: as they are, the baseline would be 4 + 4 = 8, outside of the returns 4 and 0
    mask, certain = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.float64)
    out = optimal_token_baseline(table([4.0], [0.0]), mask, ids(0, 0), certain, table([1 + 2e-7], [1 - 1e-7]))
    assert out.advantages[:, 0].tolist() == pytest.approx([0.0, -4.0], abs=1e-6)


def test_a_group_that_does_not_vary_gets_zero_in_its_tail_too() -> None:
    log_probs, squares = probabilities([0.3, 0.6], [0.2, 0.9], [0.2, 0.9])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    for form in (optimal_token_baseline, tir_optimal_token_baseline):
        out = form(table([0.0, 0.1], [0.1, NAN], [0.0, 7.0]), mask, ids(0, 0, 1), log_probs, squares)
        assert not out.advantages.any() and out.returns[0].tolist() == [0.1, 0.1]


def test_the_tir_form_compares_the_kth_sampled_tokens() -> None:
    # row 0 calls a tool in between; its second sampled token stands at column 3 and meets column 1 of row 1
    log_probs, squares = probabilities([0.5, NAN, NAN, 0.5], [1e-300, 0.5, NAN, NAN])
    mask = torch.tensor([[True, False, False, True], [True, True, False, False]])
    rewards = table([0.0, NAN, NAN, 1.0], [0.0, 0.0, NAN, NAN])
    out = tir_optimal_token_baseline(rewards, mask, ids(0, 0), log_probs, squares)
    expected = table([1 - 0.2, 0.0, 0.0, 1 - 1 / 3.5], [-0.2, -1 / 3.5, 0.0, 0.0])
    torch.testing.assert_close(out.advantages, expected, **CLOSE)
    assert out.returns.tolist() == [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    padded = optimal_token_baseline(rewards, mask, ids(0, 0), log_probs, squares)
    assert padded.advantages[0, 3] == 1.0  # by padded positions column 3 is beyond the second longest row


def test_prime_lets_process_rewards_speak_where_outcomes_are_equal() -> None:
    mask, q = torch.ones(3, 1, dtype=torch.bool), table([2.0], [1.0], [50.0])
    out = prime(q, torch.full((3, 1), 0.1), mask, ids(0, 0, 1), process_coef=1.0, outcome_coef=1e9)
    # no rounding of the outcome comes through; the row alone says nothing
    assert out.returns.tolist() == [[1.0], [-1.0], [0.0]]
    assert out.advantages[:, 0].tolist() == pytest.approx(
        [1 / math.sqrt(1 + 1e-8), -1 / math.sqrt(1 + 1e-8), 0.0]
    )


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_no_rows_no_columns_and_no_tokens(shape: tuple[int, int]) -> None:
    junk, mask, groups = (
        torch.full(shape, NAN),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape[0], dtype=torch.int64),
    )
    for out in (
        gae(junk, junk, mask, gamma=1.0, lam=1.0),
        reinforce_plus_plus(junk, mask, gamma=1.0),
        remax(junk, mask, torch.ones(shape[0])),
        on_policy_distillation(junk, junk, mask),
        optimal_token_baseline(junk, mask, groups, junk, junk),
        tir_optimal_token_baseline(junk, mask, groups, junk, junk, rollout_is_weights=junk),
        prime(junk, junk, mask, groups, process_coef=1.0, outcome_coef=1.0),
    ):
        assert out.advantages.shape == out.returns.shape == shape
        assert not out.advantages.any()
        assert not out.returns.any()
