"""Each policy loss on a case small enough for paper and pencil: value, slope in log-prob, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses import (
    POLICY_LOSSES,
    cispo,
    clip_cov,
    dpo,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gspo,
    kl_cov,
    sapo,
)
from hybridflow.algorithms.policy_losses import reinforce as plain_gradient
from hybridflow.algorithms.policy_losses import sppo as draw_to_target
from hybridflow.algorithms.policy_losses.clip_cov import select_clip_cov
from hybridflow.algorithms.policy_losses.kl_cov import select_kl_cov
from hybridflow.algorithms.policy_losses.types import GIVEN
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.errors import ConfigError


def f64(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def slopes(x: Tensor, out: LossOutput) -> list[list[float]]:
    found: list[list[float]] = torch.autograd.grad(out.loss, x)[0].tolist()
    return found


def apply(
    loss: Any, ratio: list[list[float]], advantage: list[list[float]], old: float = -1.0, **keys: Any
) -> tuple[Tensor, LossOutput]:
    """A loss on tokens by their ratios to the old policy; NaN: outside the mask."""
    mask = ~f64(ratio).isnan()
    before = torch.where(mask, old, math.nan).double()
    x = (before + f64(ratio).log()).requires_grad_()
    return x, loss(x, before, f64(advantage), mask, LossScale.count(mask), **keys)


def fraction(out: LossOutput, name: str) -> float:
    numerator, denominator = out.metrics[f"actor/{name}"]
    return float(numerator) / float(denominator)


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "slope", "clipped"),
    [
        # s = √1.21 = 1.1 within 1.2; each token has half the row's weight
        ([1.0, 1.21], 2.0, -2.2, -1.1, 0.0),
        ([1.0, 1.69], 2.0, -2.4, 0.0, 1.0),  # s = 1.3, clipped at 1.2
        ([1.0, 0.49], -2.0, 1.6, 0.0, 1.0),  # s = 0.7, clipped at 0.8
        ([1.0, 1.69], -2.0, 2.6, 1.3, 0.0),  # no dual clip
    ],
)
def test_gspo(ratios: list[float], advantage: float, loss: float, slope: float, clipped: float) -> None:
    x, out = apply(gspo, [ratios], [[advantage] * 2], clip_low=0.2, clip_high=0.2)
    assert float(out.loss.detach()) == pytest.approx(loss)
    assert slopes(x, out) == [pytest.approx([slope, slope])]
    assert fraction(out, "pg_clipfrac") == clipped


def test_sapo() -> None:
    x, out = apply(sapo, [[1.0, 1.0]], [[2.0, -3.0]], tau_pos=1.0, tau_neg=2.0)
    # sigmoid(0) = ½: −2·4·½ = −4 and 3·(4/2)·½ = 3, and the slope of the gate is 1 whatever τ is
    assert float(out.loss.detach()) == pytest.approx(-0.5) and slopes(x, out) == [pytest.approx([-1.0, 1.5])]
    assert fraction(out, "pg_gate") == pytest.approx(1.0)
    x, out = apply(sapo, [[3.0]], [[1.0]], tau_pos=1.0, tau_neg=2.0)
    p = 1 / (1 + math.exp(-2))
    assert float(out.loss.detach()) == pytest.approx(-4 * p)
    assert slopes(x, out) == [[pytest.approx(-4 * p * (1 - p) * 3)]]
    assert fraction(out, "pg_gate") == pytest.approx(4 * p * (1 - p))


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "slope", "clipped"),
    [
        ([1.0, 1.21], 2.0, -2.2, [-1.1, -1.1], 0.0),
        # log-ratio 3 counts as 0.4
        ([1.0, math.exp(3.0)], 2.0, -2 * math.exp(0.2), [-math.exp(0.2), 0.0], 0.5),
        # free on the other side
        ([1.0, math.exp(-3.0)], 2.0, -2 * math.exp(-1.5), [-math.exp(-1.5)] * 2, 0.0),
        ([1.0, math.exp(-3.0)], -2.0, 2 * math.exp(-0.2), [math.exp(-0.2), 0.0], 0.5),
    ],
)
def test_geo_mean(
    ratios: list[float], advantage: float, loss: float, slope: list[float], clipped: float
) -> None:
    x, out = apply(geo_mean, [ratios], [[advantage] * 2])
    assert float(out.loss.detach()) == pytest.approx(loss) and slopes(x, out) == [pytest.approx(slope)]
    assert fraction(out, "pg_clipfrac") == clipped


def test_cispo() -> None:
    x, out = apply(cispo, [[1.0, 2.0, 0.5]], [[3.0, 3.0, 3.0]])
    log_probs = x.detach()[0].tolist()
    weights = [1.0, 1.28, 0.5]  # the low side is open
    assert float(out.loss.detach()) == pytest.approx(
        -sum(w * lp for w, lp in zip(weights, log_probs, strict=True))
    )
    assert slopes(x, out) == [pytest.approx([-w for w in weights])]
    assert fraction(out, "pg_clipfrac") == pytest.approx(1 / 3)


def test_reinforce() -> None:
    x, out = apply(plain_gradient, [[1.0, 2.0]], [[3.0, -1.0]], rollout_is_weights=f64([[1.0, 4.0]]))
    assert float(out.loss.detach()) == pytest.approx((3.0 + 4.0 * (math.log(2) - 1)) / 2)
    assert slopes(x, out) == [pytest.approx([-1.5, 2.0])]
    assert POLICY_LOSSES["gpg"].function is POLICY_LOSSES["reinforce"].function is plain_gradient
    assert set(out.metrics) == {"actor/ppo_kl"} and fraction(out, "ppo_kl") == pytest.approx(-math.log(2) / 2)


def test_clip_cov_selects_between_the_bounds_and_spares_what_it_selected() -> None:
    # means are 0 in both, so cov = A·logπ: 4, 4, 9, 1, then six tokens of 0
    log_prob = f64([[2.0, -2.0, 3.0, -1.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    a = f64([[2.0, -2.0, 3.0, -1.0, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0]])
    mask = torch.ones(1, 10, dtype=torch.bool)

    def selected(old: Tensor, **keys: float) -> list[int]:
        found = select_clip_cov(
            log_prob, old, a, mask, torch.Generator().manual_seed(0), clip_cov_lb=1.5, clip_cov_ub=5.0, **keys
        )
        places: list[int] = found["clip_cov_selected"].nonzero()[:, 1].tolist()
        return places

    assert selected(log_prob, clip_cov_ratio=0.2) == [0, 1]
    assert selected(log_prob, clip_cov_ratio=1.0) == [
        0,
        1,
    ]
    assert selected(log_prob, clip_cov_ratio=0.0) in ([0], [1])  # at least one
    grown = log_prob - f64([[1.0] + [0.0] * 9])  # the first token's ratio is e: clipped already
    assert selected(grown, clip_cov_ratio=1.0) == [1]

    all_but_one = mask & (torch.arange(10) < 9)  # what stands outside has covariance 0 and is no candidate
    found = select_clip_cov(
        log_prob, log_prob, a, all_but_one, torch.Generator(), clip_cov_lb=-1.0, clip_cov_ratio=1.0
    )
    assert found["clip_cov_selected"].nonzero()[:, 1].tolist() == [0, 1, 3, 4, 5, 6, 7, 8]

    x, out = apply(
        clip_cov, [[1.5, 1.5, 1.1]], [[2.0, 2.0, 2.0]], clip_cov_selected=torch.tensor([[True, False, False]])
    )
    assert float(out.loss.detach()) == pytest.approx(-(0 + 2.4 + 2.2) / 3)
    assert slopes(x, out) == [pytest.approx([0.0, 0.0, -2.2 / 3])]
    assert fraction(out, "pg_clipfrac") == pytest.approx(1 / 3) == fraction(out, "cov_clipfrac")


def test_kl_cov_selects_the_highest_and_holds_them() -> None:
    log_prob = f64([[1.0, -1.0, 0.0, 0.0], [math.nan, 0.0, 0.0, 0.0]])
    a = f64([[2.0, -3.0, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    mask = ~log_prob.isnan()

    def selected(ratio: float) -> list[list[int]]:
        found = select_kl_cov(log_prob, log_prob, a, mask, torch.Generator(), kl_cov_ratio=ratio)[
            "kl_cov_selected"
        ]
        return [row.nonzero().flatten().tolist() for row in found]

    assert selected(0.0) == [[1], []]
    assert selected(2 / 7) == [[0, 1], []]
    assert selected(1.0) == [[0, 1, 2, 3], [1, 2, 3]]
    assert selected(4 / 7) == [[0, 1, 2, 3], []]  # of equals the first

    marks = torch.tensor([[True, True, False]])
    x, out = apply(kl_cov, [[2.0, 0.5, 2.0]], [[1.0, 1.0, 1.0]], kl_cov_selected=marks, ppo_kl_coef=0.3)
    assert float(out.loss.detach()) == pytest.approx((-4.5 + 0.6 * math.log(2)) / 3)
    assert slopes(x, out) == [pytest.approx([-1.7 / 3, -0.8 / 3, -2.0 / 3])]
    assert fraction(out, "cov_clipfrac") == pytest.approx(2 / 3)
    x, out = apply(kl_cov, [[1.0]], [[0.0]], kl_cov_selected=torch.tensor([[True]]))
    assert slopes(x, out) == [[0.0]]  # idle where the policy has not moved


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_a_covariance_loss_says_what_it_lacks(loss: Any) -> None:
    name = loss.__name__
    with pytest.raises(
        ConfigError, match=f"{name} needs {name}_selected .* call select_{name} on the whole mini-batch"
    ):
        apply(loss, [[1.0]], [[1.0]])


@pytest.mark.parametrize(
    ("p", "p_old", "advantage", "weight"),
    [
        (0.5, 0.4, 1.0, 1.25),  # moved by 0.1: within 0.15
        (0.6, 0.4, 1.0, 0.0),
        (0.6, 0.4, -1.0, 1.5),  # the wrong way, from where it may come back
        (0.2, 0.4, -1.0, 0.0),
        (0.2, 0.4, 1.0, 0.5),
        (0.1, 0.001, 1.0, 20.0),  # a rare token may grow a hundredfold, its weight to 20
    ],
)
def test_dppo_tv(p: float, p_old: float, advantage: float, weight: float) -> None:
    x, out = apply(dppo_tv, [[p / p_old]], [[advantage]], old=math.log(p_old), clip_low=0.15, clip_high=0.15)
    assert float(out.loss.detach()) == pytest.approx(-advantage * weight * math.log(p))
    assert slopes(x, out) == [[pytest.approx(-advantage * weight)]]
    assert fraction(out, "pg_clipfrac") == (weight == 0)
    assert fraction(out, "pg_clipfrac_upper") == (weight == 20)


@pytest.mark.parametrize(
    ("p", "p_old", "advantage", "inside"),
    [
        (0.5, 0.4, 1.0, True),  # D = 0.4·log 0.8 + 0.6·log 1.2 = 0.0201
        (0.6, 0.4, 1.0, False),  # 0.4·log ⅔ + 0.6·log 1.5 = 0.0811
        (0.6, 0.4, -1.0, True),
        (0.2, 0.4, -1.0, False),  # 0.4·log 2 + 0.6·log ¾ = 0.1046
        (0.2, 0.4, 1.0, True),
        (1.0, 0.99, 1.0, False),  # certain now: D is infinite
        (1.0, 1.0, 1.0, True),
        (0.96, 1.0, -1.0, True),  # −log 0.96 = 0.0408
        (0.9, 1.0, -1.0, False),
    ],
)
def test_dppo_kl(p: float, p_old: float, advantage: float, inside: bool) -> None:
    x, out = apply(dppo_kl, [[p / p_old]], [[advantage]], old=math.log(p_old), clip_low=0.05, clip_high=0.05)
    assert slopes(x, out) == [[pytest.approx(-advantage * p / p_old if inside else 0.0)]]
    assert fraction(out, "pg_clipfrac") == (not inside)


def test_dro() -> None:
    x, out = apply(dro, [[math.exp(2.0)]], [[3.0]], dro_beta=0.5)
    assert float(out.loss.detach()) == pytest.approx(-(3 * 1.0 - 0.25 * 4))
    assert slopes(x, out) == [[pytest.approx(-3 + 0.5 * 2)]]
    assert fraction(out, "dro_penalty") == pytest.approx(1.0)


def test_sppo() -> None:
    nothing = math.nan
    x, out = apply(
        draw_to_target,
        [[math.exp(1.0), math.exp(2.0)], [1.0, nothing], [nothing, nothing]],
        [[5.0, 5.0], [1.0, 7.0], [9.0, 9.0]],
    )
    # Δ is 3 and 0, the targets 5 and 1: ((3 − 5)² + (0 − 1)²)/2
    assert float(out.loss.detach()) == pytest.approx(2.5)
    assert slopes(x, out) == [
        [-2.0, -2.0],
        [-1.0, 0.0],
        [0.0, 0.0],
    ]
    assert fraction(out, "sppo_error") == pytest.approx(1.5)


def pairs(**keys: Any) -> tuple[Tensor, LossOutput]:
    """Two groups: one good row against two bad ones, and two good ones against nobody; a row of each without
    a sign or a token.
    """
    mask = torch.ones(6, 1, dtype=torch.bool)
    mask[5] = False
    a = f64([[1.0], [-1.0], [-1.0], [1.0], [0.0], [-1.0]])
    x = f64([[-1.0], [-3.0], [-1.0], [-1.0], [-1.0], [-1.0]]).requires_grad_()
    ref, groups = torch.full_like(x, -2.0).detach(), torch.tensor([7, 7, 7, 4, 7, 4])
    return x, dpo(x, x.detach(), a, mask, LossScale.count(mask), ref_log_prob=ref, group_ids=groups, **keys)


def test_dpo() -> None:
    x, out = pairs(dpo_beta=0.5)
    first, second = math.log(1 + math.exp(-1)), math.log(2)  # Δ⁺ = 1 against −1 and 1
    # three rows of five take part
    assert float(out.loss.detach()) == pytest.approx((first + second) / 2 * 3 / 5)
    p = 1 / (1 + math.exp(1))
    expected = [-0.5 * (p + 0.5), 0.5 * p, 0.25, 0.0, 0.0, 0.0]
    assert slopes(x, out) == [[pytest.approx(0.3 * slope)] for slope in expected]
    assert fraction(out, "dpo_accuracy") == 0.5 and fraction(out, "dpo_margin") == pytest.approx(0.5)
    x, out = pairs(dpo_beta=0.5, dpo_label_smoothing=0.1)
    assert float(out.loss.detach()) == pytest.approx((0.9 * first + 0.1 * (first + 1) + second) / 2 * 3 / 5)
    x, out = pairs(dpo_beta=0.5, dpo_loss="ipo")
    assert float(out.loss.detach()) == pytest.approx(((2 - 1) ** 2 + (0 - 1) ** 2) / 2 * 3 / 5)


def test_dpo_refuses() -> None:
    with pytest.raises(ConfigError, match="unknown dpo_loss 'hinge': choose from sigmoid, ipo"):
        pairs(dpo_loss="hinge")
    with pytest.raises(ConfigError, match=r"dpo_label_smoothing=0\.1 has no meaning with dpo_loss=ipo"):
        pairs(dpo_loss="ipo", dpo_label_smoothing=0.1)


def test_positive_examples() -> None:
    x = f64([[-1.0, -2.0], [-4.0, math.nan], [-8.0, -8.0]]).requires_grad_()
    mask, positive = (
        torch.tensor([[True, True], [True, False], [True, True]]),
        torch.tensor([True, True, False]),
    )
    loss = positive_example_loss(x, mask, positive, LossScale.count(mask, positive))
    assert float(loss.detach()) == pytest.approx(7 / 3)
    assert torch.autograd.grad(loss, x)[0].tolist() == [
        pytest.approx([-1 / 3, -1 / 3]),
        [pytest.approx(-1 / 3), 0.0],
        [0.0, 0.0],
    ]
    nobody = torch.zeros(3, dtype=torch.bool)
    loss = positive_example_loss(x, mask, nobody, LossScale.count(mask, nobody))
    assert float(loss.detach()) == 0.0 and not torch.autograd.grad(loss, x)[0].any()


def some(name: str, dtype: torch.dtype) -> tuple[Tensor, LossOutput]:
    mask = torch.ones(2, 2, dtype=torch.bool)
    x, old, a, weights, ref = (
        torch.tensor([[1.0, -1.0], [-0.5, 0.5]], dtype=dtype).sub(i).requires_grad_() for i in range(5)
    )
    columns = {"ref_log_prob": ref, "group_ids": torch.tensor([0, 0]), f"{name}_selected": mask}
    given = dict(zip(GIVEN, (x, old, a + 2.2, mask, LossScale.count(mask), weights), strict=True))
    out = POLICY_LOSSES[name](columns | given)
    out.loss.backward()
    assert [leaf.grad is None for leaf in (old, a, weights, ref)] == [True] * 4, "only log_prob is taught"
    return x, out


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_log_prob_is_taught_and_half_precision_computes_in_float32(name: str) -> None:
    x, out = some(name, torch.bfloat16)
    assert x.grad is not None and out.loss.dtype == torch.float32
    assert all(
        pair[0].dim() == pair[1].dim() == 0 and not pair[0].requires_grad for pair in out.metrics.values()
    )
    assert some(name, torch.float64)[1].loss.dtype == torch.float64
