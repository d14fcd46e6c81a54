"""Implicit process rewards and the loss of their model against the slow references, to 1e-9 in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import reference_corrections as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import each_seed, ragged
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.process_reward import implicit_rewards, process_reward_loss

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def outcomes(seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed + 77)
    return torch.rand(7, generator=g, dtype=torch.float64).round(decimals=1)


@each_seed
@pytest.mark.parametrize("beta", [0.05, 1.0])
@pytest.mark.parametrize("granularity", ["token", "whole"])
def test_rewards(seed: int, beta: float, granularity: str) -> None:
    b = ragged(seed)
    found = implicit_rewards(
        b.log_prob.clone().requires_grad_(), b.ref_log_prob, b.mask, beta=beta, granularity=granularity
    )
    expected = reference.implicit_rewards(
        b.log_prob.tolist(), b.ref_log_prob.tolist(), b.mask.tolist(), beta, granularity == "whole"
    )
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert not found.requires_grad


@each_seed
@pytest.mark.parametrize("beta", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("certain", [False, True])
def test_loss(seed: int, beta: float, certain: bool) -> None:
    b, outcome = ragged(seed), outcomes(seed)
    outcome = outcome > 0.5 if certain else outcome
    x = b.log_prob.clone().requires_grad_()
    found = process_reward_loss(x, b.ref_log_prob, b.mask, outcome, LossScale.count(b.mask), beta=beta)
    (slopes,) = torch.autograd.grad(found.loss, x)
    loss, gradient, accuracy, probability = reference.process_reward_loss(
        b.log_prob.tolist(), b.ref_log_prob.tolist(), b.mask.tolist(), outcome.double().tolist(), beta
    )
    assert found.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(slopes, torch.tensor(gradient, dtype=torch.float64), **EXACT)
    metrics = {name: float(n) / float(d) for name, (n, d) in found.metrics.items()}
    assert metrics == pytest.approx(
        {"process_reward/accuracy": accuracy, "process_reward/probability": probability}, rel=1e-9, abs=1e-9
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.permutations(range(7)), st.sets(st.integers(1, 6)), st.integers(0, 3))
def test_cuts_order_and_padding_change_nothing(
    seed: int, order: list[int], cuts: set[int], more: int
) -> None:
    b, outcome = ragged(seed), outcomes(seed)
    scale = LossScale.count(b.mask)

    def share(x: Tensor, ref: Tensor, mask: Tensor, rows: list[int]) -> LossOutput:
        return process_reward_loss(x[rows], ref[rows], mask[rows], outcome[rows], scale, beta=0.3)

    def pad(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, more), value=fill)

    leaf, wide_leaf = b.log_prob.clone().requires_grad_(), pad(b.log_prob, float("nan")).requires_grad_()
    whole = share(leaf, b.ref_log_prob, b.mask, list(range(7)))
    pieces = [order[start:end] for start, end in pairwise([0, *sorted(cuts), 7])]
    parts = [share(wide_leaf, pad(b.ref_log_prob, float("inf")), pad(b.mask, False), rows) for rows in pieces]
    total = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(total, whole.loss, **EXACT)
    torch.testing.assert_close(
        torch.autograd.grad(total, wide_leaf)[0], pad(torch.autograd.grad(whole.loss, leaf)[0], 0.0), **EXACT
    )
    for name, (numerator, denominator) in whole.metrics.items():
        assert (
            sum(float(part.metrics[name][1]) for part in parts) == float(denominator) == scale.num_sequences
        )
        assert sum(float(part.metrics[name][0]) for part in parts) == pytest.approx(
            float(numerator), rel=1e-9
        )
    rewards = {
        g: implicit_rewards(leaf, b.ref_log_prob, b.mask, beta=0.3, granularity=g) for g in ("token", "whole")
    }
    for granularity, found in rewards.items():
        wide = implicit_rewards(
            wide_leaf, pad(b.ref_log_prob, 1.0), pad(b.mask, False), beta=0.3, granularity=granularity
        )
        torch.testing.assert_close(wide, pad(found, 0.0), **EXACT)
    torch.testing.assert_close(rewards["token"].sum(-1), rewards["whole"].sum(-1), **EXACT)
