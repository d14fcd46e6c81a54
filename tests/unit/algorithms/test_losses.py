"""Losses and aggregation on cases small enough for paper and pencil."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import preference
from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.aggregation import LossOutput, LossScale, aggregate
from hybridflow.algorithms.policy_losses import (
    POLICY_LOSSES,
    LossInputs,
    PolicyLoss,
    register_policy_loss,
)
from hybridflow.algorithms.policy_losses.dpo import dpo, in_a_pair
from hybridflow.algorithms.policy_losses.sppo import sppo
from hybridflow.algorithms.policy_losses.vanilla import vanilla
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.algorithms.process_reward import process_reward_loss
from hybridflow.algorithms.value_loss import value_loss
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.own_code import loss_fault
from hybridflow.errors import ConfigError

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
TOKENS = torch.tensor([[1.0, 3.0, math.nan], [6.0, math.inf, -1.0], [math.nan, 5.0, 5.0]])


def test_counts() -> None:
    assert LossScale.count(MASK, torch.tensor([True, False, True])) == LossScale(3.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 15 / 4),
        ("seq-mean-token-sum", 15 / 2),
        ("seq-mean-token-mean", (2 / 2 + 6 / 2 + 5) / 2),
        ("seq-mean-token-sum-norm", 15 / (2 * 8)),
    ],
)
def test_a_trajectory_of_two_rows_is_one_sequence(mode: str, expected: float) -> None:
    mask = MASK.clone()
    mask[2, 1] = True
    scale = LossScale.count(mask, trajectory_id=torch.tensor([4, 4, 9]))
    assert scale == LossScale(4.0, 2.0)
    scale = replace(scale, trajectory_rows=torch.tensor([2, 2, 1]))
    assert float(aggregate(TOKENS, mask, mode, scale, 8.0)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-sum", 4 + 0.5 * 6 + 3 * 5),
        ("token-mean", (4 + 0.5 * 6 + 3 * 5) / (2 + 0.5 + 3)),
        ("seq-mean-token-sum", (4 + 0.5 * 6 + 3 * 5) / (1 + 0.5 + 3)),
        ("seq-mean-token-mean", (2 + 0.5 * 6 + 3 * 5) / (1 + 0.5 + 3)),
        ("seq-mean-token-sum-norm", (4 + 0.5 * 6 + 3 * 5) / ((1 + 0.5 + 3) * 8)),
    ],
)
def test_rows_with_weights_make_a_weighted_mean(mode: str, expected: float) -> None:
    """The values of the rows are 1 and 3, 6, and 5; a weight stands in the sum and in the count."""
    mask = MASK.clone()
    mask[2, 1] = True
    weights = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
    scale = replace(LossScale.count(mask, row_weights=weights), row_weights=weights)
    assert float(aggregate(TOKENS.double(), mask, mode, scale, 8.0)) == pytest.approx(expected, rel=1e-15)


def test_a_pair_of_trajectories_of_several_rows_is_one_pair() -> None:
    """The better one has two rows: the loss and the gradient are those of one row with the tokens of both."""
    moved = torch.tensor([[0.3, 0.2], [0.4, 0.0], [-0.1, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    zeros = torch.zeros_like(moved)
    advantages = torch.tensor([[1.0], [1.0], [-1.0]]).expand(3, 2)
    names = torch.tensor([6, 6, 2])
    x = moved.clone().requires_grad_()
    out = dpo(
        LossInputs(x, zeros, advantages, mask, LossScale.count(mask, trajectory_id=names)),
        ref_log_prob=zeros,
        group_ids=torch.zeros(3, dtype=torch.int64),
        trajectory_id=names,
        dpo_beta=0.5,
    )
    margin = 0.5 * ((0.3 + 0.2 + 0.4) - (-0.1 + 0.5))
    assert float(out.loss.detach()) == pytest.approx(math.log1p(math.exp(-margin)))
    slope = 0.5 / (1 + math.exp(margin))
    (gradient,) = torch.autograd.grad(out.loss, x)
    expected = torch.tensor([[-slope, -slope], [-slope, 0.0], [slope, slope]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert float(out.metrics["actor/dpo_margin"][0]) == pytest.approx(margin)
    assert int(out.metrics["actor/dpo_margin"][1]) == 1


def test_sppo_refuses_a_trajectory_of_several_rows() -> None:
    x = torch.zeros(2, 1)
    scale = LossScale(2.0, 1.0, trajectory_rows=torch.tensor([2, 2]))
    with pytest.raises(ConfigError, match="loss_mode=sppo compares whole responses"):
        sppo(LossInputs(x, x, x, torch.ones(2, 1, dtype=torch.bool), scale))


def test_aggregation_refuses_by_name() -> None:
    with pytest.raises(ConfigError, match="'token_mean': choose from token-mean"):
        aggregate(TOKENS, MASK, "token_mean", LossScale(1, 1))
    with pytest.raises(ConfigError, match="needs a loss_scale_factor"):
        aggregate(TOKENS, MASK, "seq-mean-token-sum-norm", LossScale(1, 1))


def one_token(ratio: float, advantage: float, **keys: float) -> tuple[float, float, LossOutput]:
    """Loss and its slope in log_prob for a single token."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    x = (old + math.log(ratio)).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    a = torch.full((1, 1), advantage, dtype=torch.float64)
    out = vanilla(LossInputs(x, old, a, mask, LossScale.count(mask)), **keys)  # type: ignore[arg-type]
    return out.loss.item(), float(torch.autograd.grad(out.loss, x)[0]), out


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped", "bounded"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.25, 2.0, -2.5, -2.5, 0, 0),  # inside the higher clip
        (1.5, 2.0, -2.56, 0.0, 1, 0),  # 1.28
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # a good token that lost ground is not clipped
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # 0.8
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (4.0, -2.0, 6.0, 0.0, 0, 1),  # dual clip at 3
    ],
)
def test_vanilla_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, clipped: int, bounded: int
) -> None:
    found, gradient, out = one_token(ratio, advantage, clip_low=0.2, clip_high=0.28, clip_c=3.0)
    assert found == pytest.approx(loss) and gradient == pytest.approx(slope)
    assert float(out.metrics["actor/pg_clipfrac"][0]) == clipped
    assert float(out.metrics["actor/pg_clipfrac_lower"][0]) == bounded
    assert float(out.metrics["actor/ppo_kl"][0]) == pytest.approx(-math.log(ratio))
    assert float(out.metrics["actor/ppo_kl"][1]) == 1


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope", "clipped"),
    [
        (1.2, 0.5, 0.5 * 0.8**2, -0.8, 0),  # inside the range
        (1.9, 0.5, 0.5 * 0.5**2, 0.0, 1),  # moved past 1.5, which is farther from 2: the clipped term decides
        (3.0, 0.5, 0.5 * 1.0, 1.0, 0),  # past the target, where the plain term is the larger
        (1.9, None, 0.5 * 0.1**2, -0.1, 0),
    ],
)
def test_value_loss_by_hand(
    value: float, clip: float | None, loss: float, slope: float, clipped: int
) -> None:
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    out = value_loss(v, one, 2 * one, one.bool(), LossScale(1, 1), clip_range=clip)
    assert float(out.loss.detach()) == pytest.approx(loss)
    assert float(torch.autograd.grad(out.loss, v)[0]) == pytest.approx(slope)
    assert [float(out.metrics["critic/vf_clipfrac"][0]), float(out.metrics["critic/vpred_mean"][0])] == [
        clipped,
        value,
    ]


def test_rows_in_a_pair_by_hand() -> None:
    advantages = torch.tensor([[1.0, 1.0], [-1.0, 0.0], [2.0, 2.0], [3.0, 3.0], [-1.0, -1.0], [0.0, 0.0]])
    groups = torch.tensor([7, 7, 3, 3, 5, 7])
    every_token = torch.ones_like(advantages, dtype=torch.bool)
    # group 7 has both signs and a row of mean 0; groups 3 and 5 have one sign each
    assert in_a_pair(advantages, every_token, groups).tolist() == [True, True, False, False, False, False]
    without_the_partner = every_token.clone()
    without_the_partner[1] = False
    assert not in_a_pair(advantages, without_the_partner, groups).any()


def test_every_docstring_opens_with_its_equation_and_says_what_was_left_out() -> None:
    estimators = [entry.function for entry in ADVANTAGE_ESTIMATORS.values()]
    for function in estimators:
        equation = (inspect.getdoc(function) or "").split("\n\n")[0]
        assert re.match(r"\S+ = ", equation) and re.search(r"\bA(_\w)? = ", equation), function
    losses = [record.function for record in POLICY_LOSSES.values()]
    losses += [getattr(preference, name) for name in preference.__all__ if name != "kto_reference_point"]
    losses += [value_loss, positive_example_loss, process_reward_loss]
    for function in losses:
        assert re.search(r"[−·²Σσ]", (inspect.getdoc(function) or "").split("\n\n")[0]), function
    for function in [*estimators, *losses]:
        text = inspect.getdoc(function) or ""
        assert "Left out: " in text, function
        assert re.search(r"\d{4}\.\d{5}", text + (inspect.getmodule(function).__doc__ or "")), function


def test_a_loss_with_star_arguments_gets_by_name_what_it_names_in_an_order_of_its_own() -> None:
    def as_verl(old_log_prob: Tensor, log_prob: Tensor, *args: object, **kwargs: object) -> LossOutput:
        assert not args and "advantages" in kwargs
        return LossOutput((log_prob - old_log_prob).sum(), {})

    def whole(inputs: LossInputs, *args: object) -> LossOutput:
        return LossOutput((inputs.log_prob - inputs.old_log_prob).sum(), {})

    def by_place(new: Tensor, old: Tensor, *args: object) -> LossOutput:
        return LossOutput((new - old).sum(), {})

    ones = torch.ones(2, 3)
    inputs = LossInputs(3 * ones, ones, ones, ones.bool(), LossScale.count(ones))
    for function in (as_verl, whole, by_place):
        assert loss_fault(inspect.signature(function), ActorConfig()) == ""
        places, named = PolicyLoss(function).arguments(inputs, {})
        assert function(*places, **named).loss == 12


def test_a_loss_of_ones_own_is_a_record_and_a_taken_name_is_refused() -> None:
    def mine(*args: object, keen: float = 1.0, loss_agg_mode: str | None = None) -> LossOutput:
        return LossOutput(torch.zeros(()), {})

    try:
        assert register_policy_loss("of_mine", agg_mode="token-sum", keeps_groups=True)(mine) is mine
        record = POLICY_LOSSES["of_mine"]
        assert (record.function, record.agg_mode, record.keeps_groups, record.select) == (
            mine,
            "token-sum",
            True,
            None,
        )
        assert record.keywords == ("keen", "loss_agg_mode")
        for taken in ("vanilla", "of_mine"):
            with pytest.raises(ConfigError, match=f"'{taken}' exists already"):
                register_policy_loss(taken)(mine)
    finally:
        POLICY_LOSSES.pop("of_mine", None)
    with pytest.raises(ConfigError, match="'of_mine': unknown agg_mode 'mean': choose from token-mean"):
        register_policy_loss("of_mine", agg_mode="mean")
