"""Process rewards on cases small enough for paper and pencil."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.algorithms.process_reward import implicit_rewards, process_reward_loss
from hybridflow.errors import ConfigError

MASK = torch.tensor([[True, False, True, False], [False, True, False, False], [False, False, False, False]])
REF = torch.tensor([[-1.0, math.nan, -2.0, 0.0], [math.inf, -1.0, 0.0, 0.0], [math.nan, 0.0, 0.0, 0.0]])
LOG_PROB = torch.tensor(
    [[-0.5, math.inf, -3.0, math.nan], [0.0, -1.0 + math.log(3), 5.0, 5.0], [1.0, math.nan, 1.0, 1.0]]
)


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(ConfigError, match="granularity got 'turn': set token or whole"):
        implicit_rewards(LOG_PROB, REF, MASK, beta=2.0, granularity="turn")


def test_rows_of_one_trajectory_share_its_weight() -> None:
    """Rows 0 and 1 are one trajectory, whose loss is the mean of theirs."""
    outcome = torch.tensor([True, True, True])
    names = torch.tensor([3, 3, 5])
    scale = replace(LossScale.count(MASK, trajectory_id=names), trajectory_rows=torch.tensor([2, 2, 1]))
    out = process_reward_loss(LOG_PROB, REF, MASK, outcome, scale, beta=1.0)
    assert out.loss.item() == pytest.approx((math.log1p(math.exp(0.5)) + math.log(4 / 3)) / 2)


def test_loss_by_hand() -> None:
    """Row 1 has h = log 3: a chance of ¾; row 0 has h = −½."""
    outcome = torch.tensor([False, True, True])
    x = LOG_PROB.clone().requires_grad_()
    out = process_reward_loss(x, REF, MASK, outcome, LossScale.count(MASK), beta=1.0)
    wrong = math.log1p(math.exp(-0.5))
    assert out.loss.item() == pytest.approx((wrong + math.log(4 / 3)) / 2)
    (slope,) = torch.autograd.grad(out.loss, x)
    chance = 1 / (1 + math.exp(0.5))
    expected = torch.tensor([[chance / 2, 0.0, chance / 2, 0.0], [0.0, -0.125, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(slope, expected)
    metrics = {name: (float(n), float(d)) for name, (n, d) in out.metrics.items()}
    assert metrics == {
        "process_reward/accuracy": (2.0, 2.0),
        "process_reward/probability": (pytest.approx(0.75 + chance), 2.0),
    }


def test_a_model_that_is_still_its_reference_says_half() -> None:
    reference = torch.zeros(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    outcome = torch.tensor([1.0, 0.0])
    out = process_reward_loss(reference, reference, mask, outcome, LossScale.count(mask), beta=0.05)
    assert out.loss.item() == pytest.approx(math.log(2))
    assert float(out.metrics["process_reward/probability"][0]) == 1.0


def test_nothing_to_learn_from() -> None:
    x = LOG_PROB.clone().requires_grad_()
    nothing = torch.zeros_like(MASK)
    out = process_reward_loss(x, REF, nothing, torch.full((3,), math.nan), LossScale.count(nothing), beta=1.0)
    assert out.loss.item() == 0.0 and not torch.autograd.grad(out.loss, x)[0].any()
    assert all(float(d) == 0 for _, d in out.metrics.values())
    assert not implicit_rewards(x, REF, nothing, beta=1.0, granularity="whole").any()
