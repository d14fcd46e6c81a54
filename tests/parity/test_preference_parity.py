"""Preference losses, values and gradients, against the slow references, to 1e-9 in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference_corrections as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import each_seed
from torch import Tensor

from hybridflow.algorithms.preference import bradley_terry, dpo, ipo, kto, kto_reference_point, orpo, simpo

EXACT = {"rtol": 1e-9, "atol": 1e-9}
K = 9
Loss = Callable[[Tensor, Tensor], Tensor]
Slow = Callable[[int, float, float], reference.Pair]


def numbers(seed: int, *, log_probs: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two numbers and two lengths a pair; some of the numbers are extreme."""
    g = torch.Generator().manual_seed(seed)
    chosen, rejected = (torch.randn(K, generator=g, dtype=torch.float64) * 3 for _ in range(2))
    lengths = [torch.randint(1, 9, (K,), generator=g) for _ in range(2)]
    if log_probs:
        chosen, rejected = -chosen.abs() - 0.01, -rejected.abs() - 0.01
        chosen[1], rejected[2] = -600.0, -600.0  # far from both
        chosen[3], rejected[4] = -1e-3, -1e-3  # almost sure
        lengths[0][3] = lengths[1][4] = 1
    else:
        chosen[1], rejected[1] = 400.0, -400.0
        chosen[2], rejected[2] = -400.0, 400.0
        chosen[3] = rejected[3]
    return chosen, rejected, lengths[0], lengths[1]


def agrees(chosen: Tensor, rejected: Tensor, found: Loss, slow: Slow) -> None:
    leaves = [x.clone().requires_grad_() for x in (chosen, rejected)]
    value = found(*leaves)
    assert value.shape == (K,)
    slopes = torch.autograd.grad(value.sum(), leaves)
    expected = torch.tensor(
        [slow(k, float(chosen[k]), float(rejected[k])) for k in range(K)], dtype=torch.float64
    )
    for one, other in zip((value.detach(), *slopes), expected.unbind(-1), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@each_seed
@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("swapped", [0.0, 0.1, 0.4])
def test_dpo(seed: int, beta: float, swapped: float) -> None:
    chosen, rejected, _, _ = numbers(seed)
    agrees(
        chosen,
        rejected,
        lambda x, y: dpo(x, y, beta=beta, label_smoothing=swapped),
        lambda _, x, y: reference.dpo(x, y, beta, swapped),
    )


@each_seed
@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
def test_ipo(seed: int, beta: float) -> None:
    chosen, rejected, _, _ = numbers(seed)
    agrees(chosen, rejected, lambda x, y: ipo(x, y, beta=beta), lambda _, x, y: reference.ipo(x, y, beta))


@each_seed
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.33, 0.7)])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_kto(seed: int, weights: tuple[float, float], beta: float) -> None:
    delta, mismatched, lengths, _ = numbers(seed)
    good = lengths % 2 == 0
    assert good.any() and not good.all()
    for others in (mismatched.abs(), -mismatched.abs(), mismatched[:0]):  # a mean above 0, below 0, and none
        point = kto_reference_point(others.clone().requires_grad_())
        z = max(0.0, reference.mean(others.tolist()))
        assert float(point) == pytest.approx(z, rel=1e-9) and not point.requires_grad
        leaf = delta.clone().requires_grad_()
        found = kto(leaf, good, point, beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
        (slope,) = torch.autograd.grad(found.sum(), leaf)
        expected = [
            reference.kto(x, bool(y), z, beta, *weights)
            for x, y in zip(delta.tolist(), good.tolist(), strict=True)
        ]
        torch.testing.assert_close(
            torch.stack([found.detach(), slope], -1), torch.tensor(expected, dtype=torch.float64), **EXACT
        )


@each_seed
@pytest.mark.parametrize(("beta", "margin"), [(2.0, 1.0), (2.5, 0.3), (10.0, 0.0)])
def test_simpo(seed: int, beta: float, margin: float) -> None:
    chosen, rejected, m, n = numbers(seed, log_probs=True)
    agrees(
        chosen,
        rejected,
        lambda x, y: simpo(x, y, m, n, beta=beta, margin=margin),
        lambda k, x, y: reference.simpo(x, y, int(m[k]), int(n[k]), beta, margin),
    )


@each_seed
@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0])
def test_orpo(seed: int, factor: float) -> None:
    chosen, rejected, m, n = numbers(seed, log_probs=True)
    agrees(
        chosen,
        rejected,
        lambda x, y: orpo(x, y, m, n, odds_weight=factor),
        lambda k, x, y: reference.orpo(x, y, int(m[k]), int(n[k]), factor),
    )


@each_seed
def test_bradley_terry(seed: int) -> None:
    chosen, rejected, lengths, _ = numbers(seed)
    margins = lengths.double() / 3
    agrees(chosen, rejected, bradley_terry, lambda _, x, y: reference.bradley_terry(x, y, 0.0))
    agrees(
        chosen,
        rejected,
        lambda x, y: bradley_terry(x, y, 0.7),
        lambda _, x, y: reference.bradley_terry(x, y, 0.7),
    )
    agrees(
        chosen,
        rejected,
        lambda x, y: bradley_terry(x, y, margins),
        lambda k, x, y: reference.bradley_terry(x, y, float(margins[k])),
    )


def every_loss(pairs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """[7, K]."""
    x, y, m, n = pairs
    z = torch.tensor(0.3, dtype=torch.float64)
    losses = (
        dpo(x, y, beta=0.1, label_smoothing=0.1),
        ipo(x, y, beta=0.1),
        kto(x, m > n, z, beta=0.1),
        bradley_terry(x, y),
    )
    return torch.stack([*losses, simpo(x, y, m, n), orpo(x, y, m, n), dpo(x, y, beta=2.0)])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.permutations(range(K)), st.integers(0, K))
def test_each_pair_is_its_own_matter(seed: int, order: list[int], cut: int) -> None:
    """Order and cuts into micro-batches change no pair's loss, not even a cut that leaves a part empty."""
    chosen, rejected, m, n = numbers(seed, log_probs=True)
    whole = every_loss((chosen, rejected, m, n))
    parts = [
        every_loss((chosen[rows], rejected[rows], m[rows], n[rows])) for rows in (order[:cut], order[cut:])
    ]
    torch.testing.assert_close(torch.cat(parts, -1), whole[:, order], **EXACT)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.floats(-50, 50))
def test_only_the_difference_counts(seed: int, shift: float) -> None:
    """What is added to both responses of a pair, the log of a partition function for one, leaves no trace."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(K, generator=g, dtype=torch.float64) for _ in range(2))
    for loss in (lambda a, b: dpo(a, b, beta=0.5), lambda a, b: ipo(a, b, beta=0.5), bradley_terry):
        torch.testing.assert_close(loss(x + shift, y + shift), loss(x, y), **EXACT)
    # swapping both labels is what label smoothing ½ could not tell apart; DPO's two sides differ by
    # β·(difference)
    torch.testing.assert_close(dpo(x, y, beta=0.5) - dpo(y, x, beta=0.5), -0.5 * (x - y), **EXACT)
