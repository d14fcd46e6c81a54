"""Estimators against the slow references, to 1e-9 in float64."""

from __future__ import annotations

import pytest
import reference_maths as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import SEEDS, ragged

from hybridflow.algorithms.advantages import gae, grpo
from hybridflow.algorithms.masked import masked_whiten

EXACT = {"rtol": 0.0, "atol": 1e-9}


def close(found: torch.Tensor, expected: reference.Rows) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae(seed: int, gamma: float, lam: float) -> None:
    b = ragged(seed)
    out = gae(b.rewards, b.values, b.mask, gamma=gamma, lam=lam)
    advantages, returns = reference.gae(b.rewards.tolist(), b.values.tolist(), b.mask.tolist(), gamma, lam)
    close(out.returns, returns)
    close(out.advantages, reference.whiten(advantages, b.mask.tolist()))


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_whitens_over_the_loss_mask_only(seed: int) -> None:
    b = ragged(seed)
    loss_mask = b.mask & (torch.arange(b.mask.shape[0]) != 3).unsqueeze(1)
    out = gae(b.rewards, b.values, b.mask, gamma=0.99, lam=0.9, loss_mask=loss_mask)
    advantages, returns = reference.gae(b.rewards.tolist(), b.values.tolist(), b.mask.tolist(), 0.99, 0.9)
    close(out.returns, returns)
    close(out.advantages, reference.whiten(advantages, loss_mask.tolist()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo(seed: int, norm_by_std: bool) -> None:
    b = ragged(seed)
    out = grpo(b.rewards, b.mask, b.groups, norm_by_std=norm_by_std)
    close(out.advantages, reference.grpo(b.rewards.tolist(), b.mask.tolist(), b.groups.tolist(), norm_by_std))
    assert torch.equal(out.returns, out.advantages) and out.returns is not out.advantages


@pytest.mark.parametrize("seed", SEEDS)
def test_whitening(seed: int) -> None:
    b = ragged(seed)
    close(masked_whiten(b.rewards, b.mask), reference.whiten(b.rewards.tolist(), b.mask.tolist()))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.permutations(range(7)), st.integers(0, 3))
def test_row_order_and_padding_do_not_matter(seed: int, order: list[int], more: int) -> None:
    b = ragged(seed)

    def moved(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(x[order], (0, more), value=fill)

    mask = moved(b.mask, False)
    for plain, shuffled in (
        (
            gae(b.rewards, b.values, b.mask, gamma=0.97, lam=0.9),
            gae(moved(b.rewards, float("nan")), moved(b.values, 3.0), mask, gamma=0.97, lam=0.9),
        ),
        (
            grpo(b.rewards, b.mask, b.groups, norm_by_std=True),
            grpo(moved(b.rewards, float("inf")), mask, b.groups[order], norm_by_std=True),
        ),
    ):
        for name in ("advantages", "returns"):
            torch.testing.assert_close(getattr(shuffled, name), moved(getattr(plain, name), 0.0), **EXACT)
