"""KL estimators, values and gradients, against the slow references, to 1e-9 in float64."""

from __future__ import annotations

import pytest
import reference_maths as reference
import torch
from ragged_batches import each_seed, ragged
from torch import Tensor

from hybridflow.algorithms.catalog import KL_ESTIMATORS
from hybridflow.algorithms.kl import kl_estimate

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@each_seed
@pytest.mark.parametrize("kind", [*KL_ESTIMATORS, *(f"{kind}+" for kind in KL_ESTIMATORS)])
def test_estimators(seed: int, kind: str) -> None:
    b = ragged(seed)
    x = b.log_prob.clone().requires_grad_()
    found = kl_estimate(x, b.ref_log_prob, kind, b.mask)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    value, slope = torch.zeros_like(found), torch.zeros_like(found)
    for i, t in b.mask.nonzero().tolist():
        pair = float(b.log_prob[i, t]), float(b.ref_log_prob[i, t])
        value[i, t], slope[i, t] = (
            reference.kl_value(*pair, kind.removesuffix("+")),
            reference.kl_slope(*pair, kind),
        )
    torch.testing.assert_close(found.detach(), value, **EXACT)
    torch.testing.assert_close(gradient, slope, **EXACT)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Σ_v π(v)·(log π(v) − log π_ref(v)) [M], from logits [M, V]."""
    log_p = logits.log_softmax(-1)
    return (log_p.exp() * (log_p - ref_logits.log_softmax(-1))).sum(-1)


def test_the_mean_of_each_estimator_is_the_full_kl() -> None:
    """Averaged over the policy's own tokens, k1 and k3 are unbiased: sums over a vocabulary instead of
    samples.
    """
    g = torch.Generator().manual_seed(9)
    logits, other = (torch.randn(1, 7, generator=g, dtype=torch.float64) for _ in range(2))
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    for kind in ("k1", "k3"):
        expected = (log_p.exp() * kl_estimate(log_p, log_q, kind)).sum(-1)
        torch.testing.assert_close(full_kl(logits, other), expected, **EXACT)
    # and k2's gradient, which `+` gives to every estimator, is that of the full KL
    leaf = logits.clone().requires_grad_()
    estimate = (log_p.exp() * kl_estimate(leaf.log_softmax(-1), log_q, "k3+")).sum()
    full = full_kl(leaf, other).sum()
    torch.testing.assert_close(
        torch.autograd.grad(estimate, leaf)[0], torch.autograd.grad(full, leaf)[0], **EXACT
    )
