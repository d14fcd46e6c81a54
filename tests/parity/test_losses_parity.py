"""Losses, values and gradients, against the slow references, to 1e-9 in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import reference_maths as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import SEEDS, Ragged, ragged
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale, aggregate
from hybridflow.algorithms.policy_losses import vanilla
from hybridflow.algorithms.value_loss import value_loss

EXACT = {"rtol": 1e-9, "atol": 1e-9}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FACTOR = 11.0


def with_gradient(x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def same_value_and_gradient(x: Tensor, found: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor]) -> None:
    for a, b in zip(with_gradient(x, found), with_gradient(x, expected), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_aggregation(seed: int, mode: str) -> None:
    b = ragged(seed)
    mask = b.mask.tolist()
    same_value_and_gradient(
        b.values,
        lambda x: aggregate(x, b.mask, mode, LossScale.count(b.mask), FACTOR),
        lambda x: reference.aggregate(lambda i, t: x[i, t], mask, mode, FACTOR),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, 3.0), (0.2, 0.28, 3.0), (0.1, 0.5, None)])
@pytest.mark.parametrize("weighted", [False, True])
def test_vanilla(seed: int, mode: str, low: float, high: float, c: float | None, weighted: bool) -> None:
    b = ragged(seed)
    weights = b.weights if weighted else None

    def token(x: Tensor, i: int, t: int) -> Tensor:
        weight = float(b.weights[i, t]) if weighted else 1.0
        return reference.ppo_token(x[i, t], float(b.old_log_prob[i, t]), float(b.advantages[i, t]), low, high, c, weight)

    keys = {"clip_low": low, "clip_high": high, "clip_c": c, "loss_agg_mode": mode, "loss_scale_factor": FACTOR}
    same_value_and_gradient(
        b.log_prob,
        lambda x: vanilla(x, b.old_log_prob, b.advantages, b.mask, LossScale.count(b.mask), weights, **keys).loss,  # type: ignore[arg-type]
        lambda x: reference.aggregate(lambda i, t: token(x, i, t), b.mask.tolist(), mode, FACTOR),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.5, 0.05, None])
@pytest.mark.parametrize("mode", MODES)
def test_value_loss(seed: int, clip: float | None, mode: str) -> None:
    b = ragged(seed)

    def token(x: Tensor, i: int, t: int) -> Tensor:
        return reference.value_token(x[i, t], float(b.old_values[i, t]), float(b.returns[i, t]), clip)

    scale = LossScale.count(b.mask)
    same_value_and_gradient(
        b.values,
        lambda x: value_loss(x, b.old_values, b.returns, b.mask, scale, clip_range=clip, loss_agg_mode=mode, loss_scale_factor=FACTOR).loss,
        lambda x: reference.aggregate(lambda i, t: token(x, i, t), b.mask.tolist(), mode, FACTOR),
    )


def every_loss(b: Ragged, x: Tensor, rows: list[int], scale: LossScale, mode: str) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    mask = b.mask[rows]
    keys = {"loss_agg_mode": mode, "loss_scale_factor": FACTOR}
    outputs = [
        vanilla(x[rows], b.old_log_prob[rows], b.advantages[rows], mask, scale, b.weights[rows], **keys),  # type: ignore[arg-type]
        value_loss(x[rows], b.old_values[rows], b.returns[rows], mask, scale, clip_range=0.3, **keys),  # type: ignore[arg-type]
    ]
    metrics = {name: (float(n), float(d)) for out in outputs for name, (n, d) in out.metrics.items()}
    return sum((out.loss for out in outputs), torch.zeros((), dtype=torch.float64)), metrics


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.permutations(range(7)), st.sets(st.integers(1, 6)), st.sampled_from(MODES))
def test_cutting_into_micro_batches_changes_no_loss_gradient_or_metric(seed: int, order: list[int], cuts: set[int], mode: str) -> None:
    b = ragged(seed)
    scale = LossScale.count(b.mask)
    edges = [0, *sorted(cuts), 7]
    pieces = [order[start:end] for start, end in pairwise(edges)]
    metrics: dict[str, tuple[float, float]] = {}

    def in_pieces(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in pieces:
            share, found = every_loss(b, x, rows, scale, mode)
            total = total + share
            metrics.update({k: (metrics.get(k, (0.0, 0.0))[0] + n, metrics.get(k, (0.0, 0.0))[1] + d) for k, (n, d) in found.items()})
        return total

    same_value_and_gradient(b.log_prob, in_pieces, lambda x: every_loss(b, x, list(range(7)), scale, mode)[0])
    whole = every_loss(b, b.log_prob, list(range(7)), scale, mode)[1]
    for name, (numerator, denominator) in whole.items():
        assert metrics[name][1] == denominator == float(b.mask.sum())
        assert abs(metrics[name][0] - numerator) < 1e-9 * max(1.0, abs(numerator)), name


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from(MODES))
def test_padding_changes_nothing(seed: int, more: int, mode: str) -> None:
    b = ragged(seed)

    def pad(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, more), value=fill)

    wide = Ragged(**{k: pad(v, False if k == "mask" else float("nan")) if v.dim() == 2 else v for k, v in vars(b).items()})
    rows, scale = list(range(7)), LossScale.count(b.mask)
    assert LossScale.count(wide.mask) == scale
    value, gradient = with_gradient(b.log_prob, lambda x: every_loss(b, x, rows, scale, mode)[0])
    wide_value, wide_gradient = with_gradient(wide.log_prob, lambda x: every_loss(wide, x, rows, scale, mode)[0])
    torch.testing.assert_close(wide_value, value, **EXACT)
    torch.testing.assert_close(wide_gradient, pad(gradient, 0.0), **EXACT)
