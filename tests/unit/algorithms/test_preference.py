"""Preference losses on cases small enough for paper and pencil, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.preference import bradley_terry, dpo, ipo, kto, kto_reference_point, orpo, simpo
from hybridflow.errors import ConfigError

LOG3 = math.log(3)
ONE = torch.ones(1)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_dpo_by_hand() -> None:
    """A difference of log 3 is a chance of 3 to 1."""
    found = dpo(numbers(0.0, LOG3, 0.0), numbers(0.0, 0.0, LOG3), beta=1.0)
    assert found.tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(4)])
    halved = dpo(numbers(2 * LOG3), numbers(0.0), beta=0.5)
    assert halved.tolist() == pytest.approx([math.log(4 / 3)])


def test_label_smoothing_by_hand() -> None:
    found = dpo(numbers(LOG3), numbers(0.0), beta=1.0, label_smoothing=0.25)
    assert found.tolist() == pytest.approx([0.75 * math.log(4 / 3) + 0.25 * math.log(4)])
    leaf = numbers(LOG3).requires_grad_()  # 3 to 1 is just what one wrong label in four asks for
    (slope,) = torch.autograd.grad(dpo(leaf, numbers(0.0), beta=1.0, label_smoothing=0.25).sum(), leaf)
    assert slope.tolist() == pytest.approx([0.0])


def test_ipo_by_hand() -> None:
    assert ipo(numbers(0.0, 5.0, 7.0), numbers(0.0, 0.0, 1.0), beta=0.1).tolist() == pytest.approx(
        [25.0, 0.0, 1.0]
    )


def test_kto_by_hand() -> None:
    good, delta = torch.tensor([True, False, True, False]), numbers(1.0 + LOG3, 1.0 + LOG3, 1.0, 1.0)
    assert kto(delta, good, 1.0, beta=1.0).tolist() == pytest.approx([0.25, 0.75, 0.5, 0.5])
    weighted = kto(delta, good, numbers(1.0)[0], beta=1.0, desirable_weight=2.0, undesirable_weight=4.0)
    assert weighted.tolist() == pytest.approx([0.5, 3.0, 1.0, 2.0])
    assert kto_reference_point(numbers(1.0, 2.0, 3.0)).item() == 2.0
    assert kto_reference_point(numbers(1.0, -2.0)).item() == 0.0 == kto_reference_point(numbers()).item()


def test_simpo_by_hand() -> None:
    """Means −1 and −1 − log 3; a sum would prefer the shorter response."""
    found = simpo(
        numbers(-8.0), numbers(-1.0 - LOG3), torch.tensor([8]), torch.tensor([1]), beta=1.0, margin=0.0
    )
    assert found.tolist() == pytest.approx([math.log(4 / 3)])
    margin = simpo(
        numbers(-8.0), numbers(-1.0 - LOG3), torch.tensor([8]), torch.tensor([1]), beta=2.0, margin=LOG3
    )
    assert margin.tolist() == pytest.approx([math.log(4 / 3)])
    empty = simpo(numbers(0.0), numbers(0.0), torch.tensor([0]), torch.tensor([0]), beta=2.0, margin=0.0)
    assert empty.tolist() == pytest.approx([math.log(2)])


def test_orpo_by_hand() -> None:
    """Probabilities ¾ and ½ a token have odds 3 and 1."""
    found = orpo(
        numbers(4 * math.log(0.75)),
        numbers(2 * math.log(0.5)),
        torch.tensor([4]),
        torch.tensor([2]),
        odds_weight=0.5,
    )
    assert found.tolist() == pytest.approx([-math.log(0.75) + 0.5 * math.log(4 / 3)])


def test_orpo_bears_certainty() -> None:
    """A response of probability 1, or of no tokens, has infinite odds: loss and slope stay finite, in float32
    too.
    """
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


def test_bradley_terry_by_hand() -> None:
    assert bradley_terry(numbers(LOG3, 0.0), numbers(0.0, LOG3)).tolist() == pytest.approx(
        [math.log(4 / 3), math.log(4)]
    )
    assert bradley_terry(numbers(2 * LOG3), numbers(0.0), LOG3).tolist() == pytest.approx([math.log(4 / 3)])
    assert bradley_terry(numbers(LOG3), numbers(0.0), numbers(LOG3)).tolist() == pytest.approx([math.log(2)])


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
