"""Inputs of public bug reports about advantages, losses and KL.

benchmarks/results/reported_inputs.md names their threads.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from estimators_of_groups import BY_SCORE
from torch import Tensor

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from hybridflow.algorithms.aggregation import LossScale, aggregate
from hybridflow.algorithms.catalog import KL_ESTIMATORS
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from hybridflow.algorithms.policy_losses.vanilla import vanilla
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.algorithms.value_loss import value_loss

NAN = float("nan")
each = pytest.mark.parametrize("name", BY_SCORE)


def scored(*scores: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Rows of two sampled tokens, each score on the last."""
    rewards = torch.zeros(len(scores), 2, dtype=dtype)
    rewards[:, 1] = torch.tensor(scores, dtype=torch.float64).to(dtype)
    return rewards, torch.ones(len(scores), 2, dtype=torch.bool)


def of(name: str, scores: list[float], groups: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return BY_SCORE[name](*scored(*scores, dtype=dtype), torch.tensor(groups)).advantages


# Groups


@each
def test_rows_alone_in_their_groups_and_one_that_a_filter_left_get_zero(name: str) -> None:
    scores = [2.0, 0.25, 2.75, 0.875] if name == "max_rl" else [2.0, -0.25, -2.75, 0.875]
    assert not of(name, scores, [0, 1, 2, 3]).any()
    ragged = of(name, scores, [0, 0, 0, 1])
    assert not ragged[3].any() and ragged[:3].any()


@each
@pytest.mark.parametrize("numbers", [[-1, 3, 9], [2, 7, 5], [10**15, 10**15 + 1, -(10**15)]])
def test_the_numbers_of_groups_are_names(name: str, numbers: list[int]) -> None:
    scores, groups = [1.0, 0.0, 3.0, 0.5, 0.25, 0.0], [0, 0, 1, 2, 1, 0]
    wanted = of(name, scores, groups)
    assert torch.equal(of(name, scores, [numbers[group] for group in groups]), wanted) and wanted.any()


@each
def test_a_group_that_varies_by_a_hundred_thousandth(name: str) -> None:
    scores = [float(x) for x in 1 + 1e-5 * torch.arange(8, dtype=torch.float64) / 7]
    rewards, _ = scored(*scores)  # as float32 holds them
    wanted = of(name, rewards[:, 1].tolist(), [0] * 8, torch.float64)
    found = of(name, scores, [0] * 8)
    assert wanted.any() and bool((found - wanted).abs().max() <= 1e-3 * wanted.abs().max())


@each
def test_one_low_score_among_equal_ones_is_no_outlier_of_thousands(name: str) -> None:
    assert float(of(name, [0.0, *[0.95] * 7], [0] * 8).abs().max()) < 20


@each
@pytest.mark.parametrize("score", [100.0, 1e6, NAN, math.inf])
def test_a_row_without_a_token_is_in_no_mean(name: str, score: float) -> None:
    rewards, mask = scored(100.0, 1.0, 2.0)
    mask[0] = False
    groups = torch.tensor([0, 0, 0])
    wanted = BY_SCORE[name](rewards[1:], mask[1:], groups[1:]).advantages
    rewards[0] = score
    found = BY_SCORE[name](rewards, mask, groups).advantages
    assert torch.equal(found[1:], wanted) and not found[0].any()
    alone = BY_SCORE[name](rewards[:2], mask[:2], groups[:2]).advantages
    assert not alone.any(), "the one row with a token is alone"


def test_returns_end_with_the_row() -> None:
    rewards, mask = torch.tensor([[1.5, 1.0, 2.0, 2.0]]), torch.tensor([[True, True, False, False]])
    wanted = [[2.5, 1.0, 0.0, 0.0]]
    assert reinforce_plus_plus(rewards, mask, gamma=1.0).returns.tolist() == wanted
    assert gae(rewards, torch.zeros(1, 4), mask, gamma=1.0, lam=1.0).returns.tolist() == wanted


# Losses

KEYS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.3,
    "clip_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "ppo_kl_coef": 0.5,
    "dro_beta": 0.3,
    "dpo_loss": "sigmoid",
    "dpo_beta": 0.1,
    "clip_cov_ratio": 0.5,
    "clip_cov_lb": -5.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.5,
    "dpo_label_smoothing": 0.0,
}


def loss_and_gradient(name: str, junk: float) -> tuple[float, Tensor]:
    """Two rows of one group; `junk` in every column where the mask is false."""
    mask = torch.tensor([[True, False], [True, False]])
    fill = torch.full((2, 2), junk)
    log_prob = torch.where(mask, torch.tensor([[-0.5, 0.0], [-1.0, 0.0]]), fill).requires_grad_()
    old, ref = (torch.where(mask, torch.full((2, 2), value), fill) for value in (-0.7, -0.8))
    advantages = torch.where(mask, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), fill)
    scale = LossScale.count(mask, torch.tensor([True, True]))
    if name == "value":
        loss = value_loss(log_prob, old, advantages, mask, scale, clip_range=0.5).loss
    elif name == "positive examples":
        loss = positive_example_loss(log_prob, mask, torch.tensor([True, True]), scale)
    elif name == "entropy":
        loss = aggregate(log_prob, mask, "token-mean", scale)
    elif name in KL_ESTIMATORS or name.endswith("+"):
        loss = aggregate(kl_estimate(log_prob, ref, name, mask), mask, "token-mean", scale)
    else:
        record = POLICY_LOSSES[name]
        rows = {"ref_log_prob": ref, "group_ids": torch.tensor([0, 0])}
        if record.select is not None:
            generator = torch.Generator().manual_seed(0)
            keywords = record.select_arguments(KEYS)
            rows |= record.select(log_prob.detach(), old, advantages, mask, generator, **keywords)
        weights = torch.where(mask, torch.ones(2, 2), fill)
        keys = {key: value for key, value in {**KEYS, **rows}.items() if key in record.keywords}
        loss = record.function(LossInputs(log_prob, old, advantages, mask, scale, weights), **keys).loss
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient


@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", [*POLICY_LOSSES, "value", "positive examples", "entropy", *KL_ESTIMATORS, "k1+", "k3+"]
)
def test_what_stands_outside_the_mask_is_in_no_loss(name: str, junk: float) -> None:
    wanted, gradient = loss_and_gradient(name, 0.0)
    found, its_gradient = loss_and_gradient(name, junk)
    assert found == wanted and math.isfinite(found) and torch.equal(its_gradient, gradient)
    assert bool(gradient.any()) or name == "clip_cov"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("difference", [5.0, 12.0, 89.0, 199.0, 200.0, 1e4])
@pytest.mark.parametrize("kind", [*KL_ESTIMATORS, *(f"{kind}+" for kind in KL_ESTIMATORS)])
@pytest.mark.parametrize("sign", [1, -1])
def test_kl_of_far_policies_is_finite_and_so_is_its_step(
    kind: str, difference: float, dtype: torch.dtype, sign: int
) -> None:
    low, high = torch.tensor([-1.0 - difference]), torch.tensor([-1.0])
    log_prob = torch.nn.Parameter(low if sign == 1 else high)
    optimizer = torch.optim.AdamW([log_prob], lr=1e-3)
    value = kl_estimate(log_prob.to(dtype), (high if sign == 1 else low).to(dtype), kind).sum()
    value.backward()
    optimizer.step()
    assert log_prob.grad is not None
    for found in (value.detach(), log_prob.grad, log_prob.detach()):
        assert bool(torch.isfinite(found).all())


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "parts",
    [
        [[0], [1], [2], [3], [4]],
        [[0, 1], [2, 3], [4]],
        [[4], [4], [0, 1, 2, 3]],
        [[0, 1], [2, 4], [3]],
    ],
)
def test_micro_batches_of_rows_of_1_2_3_10_and_no_tokens(mode: str, parts: list[list[int]]) -> None:
    lengths = torch.tensor([1, 2, 3, 10, 0])
    mask = torch.arange(10) < lengths[:, None]
    draw = torch.Generator().manual_seed(0)
    log_prob = torch.randn(5, 10, generator=draw, dtype=torch.float64).requires_grad_()
    old = torch.randn(5, 10, generator=draw, dtype=torch.float64)
    scale = LossScale.count(mask)

    def of_rows(rows: list[int]) -> tuple[Tensor, dict[str, tuple[float, float]]]:
        out = vanilla(
            LossInputs(log_prob[rows], old[rows], old[rows].cos(), mask[rows], scale),
            clip_low=0.2,
            clip_high=0.2,
            clip_c=3.0,
            loss_agg_mode=mode,
        )
        return out.loss, {key: (float(n), float(d)) for key, (n, d) in out.metrics.items()}

    whole, means = of_rows([0, 1, 2, 3, 4])
    (wanted,) = torch.autograd.grad(whole, log_prob)
    found = [of_rows(rows) for rows in parts]
    (gradient,) = torch.autograd.grad(torch.stack([loss for loss, _ in found]).sum(), log_prob)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    for key, (numerator, denominator) in means.items():
        sums = [sum(metrics[key][at] for _, metrics in found) for at in (0, 1)]
        assert sums == pytest.approx([numerator, denominator], abs=1e-12), key
