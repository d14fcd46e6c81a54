"""Preference losses on cases small enough for paper and pencil, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.preference import bradley_terry, dpo, ipo, kto, orpo, simpo
from hybridflow.errors import ConfigError

ONE = torch.ones(1)


def test_orpo_bears_certainty() -> None:
    """Probability 1 or no tokens mean infinite odds: loss and slope stay finite, in float32 too."""
    for dtype in (torch.float32, torch.float64):
        leaves = [
            torch.tensor(x, dtype=dtype, requires_grad=True) for x in ([0.0, -800.0, 0.0], [0.0, 0.0, -800.0])
        ]
        lengths = torch.tensor([1, 0, 3])
        found = orpo(*leaves, lengths, lengths)
        slopes = torch.autograd.grad(found.sum(), leaves)
        assert all(bool(x.isfinite().all()) for x in (found, *slopes))


def test_orpo_keeps_its_digits_near_certainty_in_float32() -> None:
    """1 − e^L by subtraction would lose three digits of a response that is almost sure."""
    pair, lengths = ([-2e-4], [-3e-4]), torch.tensor([1])
    single, double = (
        orpo(*(torch.tensor(x, dtype=d) for x in pair), lengths, lengths, odds_weight=1.0)
        for d in (torch.float32, torch.float64)
    )
    assert single.item() == pytest.approx(double.item(), rel=3e-7)


def test_half_precision_is_computed_in_float32() -> None:
    half, lengths = torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([3])
    losses = [
        dpo(half, -half, beta=0.1),
        ipo(half, -half, beta=0.1),
        kto(half, lengths > 0, 0.0, beta=0.1),
        simpo(-half, -half, lengths, lengths),
        orpo(-half, -half, lengths, lengths),
        bradley_terry(half, -half),
    ]
    assert {loss.dtype for loss in losses} == {torch.float32}
    assert losses[0].item() == pytest.approx(math.log1p(math.exp(-0.6)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dpo(ONE, ONE, beta=0.0), "DPO got beta 0.0: set it above 0"),
        (lambda: dpo(ONE, ONE, beta=0.1, label_smoothing=0.5), r"label_smoothing 0.5: set it in \[0, 0.5\)"),
        (lambda: dpo(ONE, ONE, beta=0.1, label_smoothing=-0.1), "label_smoothing -0.1"),
        (lambda: ipo(ONE, ONE, beta=-1.0), "IPO got beta -1.0"),
        (lambda: kto(ONE, ONE > 0, 0.0, beta=math.nan), "KTO got beta nan"),
        (lambda: simpo(ONE, ONE, ONE, ONE, beta=0.0), "SimPO got beta 0.0"),
        (
            lambda: orpo(ONE, ONE, ONE, ONE, odds_weight=-0.1),
            "ORPO got odds_weight -0.1: set it to 0 or above",
        ),
    ],
)
def test_refusals(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
