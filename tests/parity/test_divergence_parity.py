"""Divergences from a teacher against sums in float64, written as the definitions are, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.divergence import divergence, divergence_gradient

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def logits(seed: int, tokens: int = 6, outcomes: int = 7) -> Tensor:
    return 2 * torch.randn(
        tokens, outcomes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_definition(p: list[float], q: list[float], kind: str, beta: float) -> float:
    """The divergence of the student p from the teacher q, one outcome after the other."""
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_values_are_those_of_the_definitions(kind: str, beta: float) -> None:
    log_p, log_q = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    rows = zip(log_p.exp().tolist(), log_q.exp().tolist(), strict=True)
    wanted = torch.tensor([by_definition(p, q, kind, beta) for p, q in rows], dtype=torch.float64)
    torch.testing.assert_close(divergence(log_p, log_q, kind, beta), wanted, **EXACT)
    assert bool((wanted > 0).all())


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_gradient_is_that_of_the_value_by_the_logits(kind: str, beta: float) -> None:
    z = logits(2).requires_grad_()
    log_q = logits(3).log_softmax(-1)
    (wanted,) = torch.autograd.grad(divergence(z.log_softmax(-1), log_q, kind, beta).sum(), z)
    found = divergence_gradient(z.detach().log_softmax(-1), log_q, kind, beta)
    torch.testing.assert_close(found, wanted, **EXACT)
    # and autograd is that of differences
    for token, outcome in ((0, 0), (3, 5)):
        step = torch.zeros_like(found)
        step[token, outcome] = 1e-6
        ends = [
            divergence((z.detach() + sign * step).log_softmax(-1), log_q, kind, beta).sum()
            for sign in (1, -1)
        ]
        assert float((ends[0] - ends[1]) / 2e-6) == pytest.approx(float(found[token, outcome]), abs=1e-7)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_an_equal_teacher_gives_nothing_to_learn(kind: str, beta: float) -> None:
    log_p = logits(4).log_softmax(-1)
    assert float(divergence(log_p, log_p, kind, beta).abs().max()) < 1e-14
    assert float(divergence_gradient(log_p, log_p, kind, beta).abs().max()) < 1e-14


def test_the_limits_of_beta_are_the_two_kl_divergences() -> None:
    log_p, log_q = logits(5).log_softmax(-1), logits(6).log_softmax(-1)
    for beta, scale, kind in ((1e-7, 1e-7, "forward_kl"), (1 - 1e-7, 1e-7, "reverse_kl")):
        for function in (divergence, divergence_gradient):
            near = function(log_p, log_q, "jsd", beta) / scale
            torch.testing.assert_close(near, function(log_p, log_q, kind), rtol=1e-4, atol=1e-5)


def test_jsd_of_one_half_is_symmetric_and_at_most_log_2() -> None:
    log_p, log_q = logits(7).log_softmax(-1), logits(8).log_softmax(-1)
    value = divergence(log_p, log_q, "jsd", 0.5)
    torch.testing.assert_close(value, divergence(log_q, log_p, "jsd", 0.5), **EXACT)
    assert bool((value < math.log(2)).all())
