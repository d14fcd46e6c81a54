"""Estimators whose advantage differs from token to token, on cases small enough for paper and pencil."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.advantages import (
    on_policy_distillation,
    optimal_token_baseline,
    prime,
    reinforce_plus_plus,
    remax,
    tir_optimal_token_baseline,
)

NAN = float("nan")
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def table(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_reinforce_plus_plus_discounts_by_sampled_tokens() -> None:
    mask = torch.tensor([[True, False, True, True]])
    out = reinforce_plus_plus(table([0.0, NAN, 2.0, 4.0]), mask, gamma=0.5)
    assert out.returns.tolist() == [[2.0, 0.0, 4.0, 4.0]]  # 4; 2 + 2; 0 + 2, the tool's token no step
    expected = table([2.0, 4.0, 4.0])[0]
    torch.testing.assert_close(out.advantages[mask], (expected - 10 / 3) / (4 / 3 + 1e-8) ** 0.5, **CLOSE)
    assert out.advantages[0, 1] == 0


def test_reinforce_plus_plus_whitens_over_the_loss_mask() -> None:
    mask, learn = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
    out = reinforce_plus_plus(table([0.0, 5.0, 1.0]), mask, gamma=1.0, loss_mask=learn)
    assert out.returns.tolist() == [[6.0, 6.0, 1.0]]
    torch.testing.assert_close(out.advantages, table([2.5, 0.0, -2.5]) / (12.5 + 1e-8) ** 0.5, **CLOSE)


def test_remax_subtracts_the_greedy_score_from_the_reward_to_go() -> None:
    mask = torch.tensor([[True, False, True], [True, False, False]])
    out = remax(table([1.0, NAN, 2.0], [4.0, NAN, NAN]), mask, torch.tensor([0.5, 5.0]))
    assert out.returns.tolist() == [[3.0, 0.0, 2.0], [4.0, 0.0, 0.0]]
    assert out.advantages.tolist() == [[2.5, 0.0, 1.5], [-1.0, 0.0, 0.0]]


def test_distillation_is_the_teachers_log_prob_minus_the_students() -> None:
    mask = torch.tensor([[True, False, True]])
    out = on_policy_distillation(table([-1.0, NAN, -2.0]), table([-3.0, float("-inf"), -0.5]), mask)
    assert out.advantages.tolist() == out.returns.tolist() == [[-2.0, 0.0, 1.5]]


def probabilities(*pi: list[float]) -> tuple[Tensor, Tensor]:
    """Log-probs of sampled tokens and Σπ² over two words of which the sampled one is the first."""
    p = table(*pi)
    return p.log(), p.square() + (1 - p).square()


def test_optimal_token_baseline_by_hand() -> None:
    # with two words w = 1 − 2π + π² + (1 − π)² = 2(1 − π)²: rows 0.5, 0.5 and 0.0, 0.5; so W = 0.5, 1 and 2,
    # 2.5
    log_probs, squares = probabilities([0.5, 0.5], [1e-300, 0.5])
    mask = torch.ones(2, 2, dtype=torch.bool)
    out = optimal_token_baseline(table([0.0, 1.0], [0.0, 0.0]), mask, ids(3, 3), log_probs, squares)
    assert out.returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    torch.testing.assert_close(out.advantages, table([1 - 0.2, 1 - 1 / 3.5], [-0.2, -1 / 3.5]), **CLOSE)


def test_importance_weights_are_squared_before_the_sum() -> None:
    # w as above times ρ̄²: rows 0.5·4, 0.5·0 and 2·1, 0.5·4; so W = 2, 2 and 2, 4
    log_probs, squares = probabilities([0.5, 0.5], [1e-300, 0.5])
    mask = torch.ones(2, 2, dtype=torch.bool)
    weights = table([2.0, 0.0], [1.0, 2.0])
    out = optimal_token_baseline(
        table([0.0, 1.0], [0.0, 0.0]), mask, ids(3, 3), log_probs, squares, rollout_is_weights=weights
    )
    torch.testing.assert_close(out.advantages, table([0.5, 1 - 1 / 3], [-0.5, -1 / 3]), **CLOSE)


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


def test_the_tir_form_moves_importance_weights_along() -> None:
    log_probs, squares = probabilities([0.5, NAN, 0.5], [1e-300, 0.5, NAN])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    weights = table([2.0, NAN, 0.0], [1.0, 2.0, NAN])
    rewards = table([0.0, NAN, 1.0], [0.0, 0.0, NAN])
    out = tir_optimal_token_baseline(rewards, mask, ids(0, 0), log_probs, squares, rollout_is_weights=weights)
    torch.testing.assert_close(out.advantages, table([0.5, 0.0, 1 - 1 / 3], [-0.5, -1 / 3, 0.0]), **CLOSE)


def test_prime_by_hand() -> None:
    # n = 2. Process: p_t = 2·q_t − (q̄_0 + q̄_1), q̄ = 2 and 1. Row 0: 2·1 − 3 = −1, 2·3 − 3 = 3; row 1: 2·1
    # − 3 = −1. Outcome: scores 1 and 0: +1 and −1 on the last token. With coefficients 1 and 10: row 0 has
    # −1, 3 + 10; row 1 has −1 − 10.
    mask = torch.tensor([[True, True], [True, False]])
    out = prime(
        table([1.0, 3.0], [1.0, NAN]),
        table([0.0, 1.0], [0.0, NAN]),
        mask,
        ids(0, 0),
        process_coef=1.0,
        outcome_coef=10.0,
    )
    assert out.returns.tolist() == [[12.0, 13.0], [-11.0, 0.0]]
    kept = table([12.0, 13.0, -11.0])[0]
    torch.testing.assert_close(
        out.advantages[mask], (kept - kept.mean()) / (kept.var() + 1e-8).sqrt(), **CLOSE
    )


def test_prime_lets_process_rewards_speak_where_outcomes_are_equal() -> None:
    mask, q = torch.ones(3, 1, dtype=torch.bool), table([2.0], [1.0], [50.0])
    out = prime(q, torch.full((3, 1), 0.1), mask, ids(0, 0, 1), process_coef=1.0, outcome_coef=1e9)
    # no rounding of the outcome comes through; the row alone says nothing
    assert out.returns.tolist() == [[1.0], [-1.0], [0.0]]
    assert out.advantages[:, 0].tolist() == pytest.approx(
        [1 / math.sqrt(1 + 1e-8), -1 / math.sqrt(1 + 1e-8), 0.0]
    )


def test_prime_whitens_over_the_loss_mask() -> None:
    mask, learn = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[True, False], [True, False]])
    nothing, scores = table([0.0, 0.0], [0.0, 0.0]), table([0.0, 3.0], [0.0, 0.0])
    out = prime(nothing, scores, mask, ids(0, 0), process_coef=5.0, outcome_coef=1.0, loss_mask=learn)
    assert out.returns.tolist() == [[3.0, 3.0], [-3.0, -3.0]]
    torch.testing.assert_close(out.advantages, table([3.0, 0.0], [-3.0, 0.0]) / (18 + 1e-8) ** 0.5, **CLOSE)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_no_rows_no_columns_and_no_tokens(shape: tuple[int, int]) -> None:
    junk, mask, groups = (
        torch.full(shape, NAN),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape[0], dtype=torch.int64),
    )
    for out in (
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
