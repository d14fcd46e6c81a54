"""Metrics and edges of each policy loss on cases small enough for paper and pencil."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from hybridflow.algorithms.policy_losses.cispo import cispo
from hybridflow.algorithms.policy_losses.dpo import dpo
from hybridflow.algorithms.policy_losses.dppo import dppo_kl, dppo_tv
from hybridflow.algorithms.policy_losses.dro import dro
from hybridflow.algorithms.policy_losses.entropy_cov import clip_cov, kl_cov, select_kl_cov
from hybridflow.algorithms.policy_losses.geo_mean import geo_mean
from hybridflow.algorithms.policy_losses.gspo import gspo
from hybridflow.algorithms.policy_losses.reinforce import reinforce as plain_gradient
from hybridflow.algorithms.policy_losses.sapo import sapo
from hybridflow.algorithms.policy_losses.sppo import sppo as draw_to_target
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.errors import ConfigError


def f64(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def apply(
    loss: Any, ratio: list[list[float]], advantage: list[list[float]], old: float = -1.0, **keys: Any
) -> tuple[Tensor, LossOutput]:
    """A loss on tokens by their ratios to the old policy; NaN: outside the mask."""
    mask = ~f64(ratio).isnan()
    before = torch.where(mask, old, math.nan).double()
    x = (before + f64(ratio).log()).requires_grad_()
    return x, loss(LossInputs(x, before, f64(advantage), mask, LossScale.count(mask)), **keys)


def fraction(out: LossOutput, name: str) -> float:
    numerator, denominator = out.metrics[f"actor/{name}"]
    return float(numerator) / float(denominator)


P = 1 / (1 + math.exp(-2))
METRICS: list[tuple[Any, list[float], float, dict[str, Any], dict[str, float]]] = [
    (gspo, [1.0, 1.21], 2.0, {"clip_low": 0.2, "clip_high": 0.2}, {"pg_clipfrac": 0.0}),  # √1.21 within 1.2
    (gspo, [1.0, 1.69], 2.0, {"clip_low": 0.2, "clip_high": 0.2}, {"pg_clipfrac": 1.0}),
    (gspo, [1.0, 0.49], -2.0, {"clip_low": 0.2, "clip_high": 0.2}, {"pg_clipfrac": 1.0}),
    (gspo, [1.0, 1.69], -2.0, {"clip_low": 0.2, "clip_high": 0.2}, {"pg_clipfrac": 0.0}),  # no dual clip
    (sapo, [1.0, 1.0], 2.0, {"tau_pos": 1.0, "tau_neg": 2.0}, {"pg_gate": 1.0}),
    (sapo, [3.0], 1.0, {"tau_pos": 1.0, "tau_neg": 2.0}, {"pg_gate": 4 * P * (1 - P)}),
    (geo_mean, [1.0, 1.21], 2.0, {}, {"pg_clipfrac": 0.0}),
    (geo_mean, [1.0, math.exp(3.0)], 2.0, {}, {"pg_clipfrac": 0.5}),
    (geo_mean, [1.0, math.exp(-3.0)], 2.0, {}, {"pg_clipfrac": 0.0}),  # free on the other side
    (geo_mean, [1.0, math.exp(-3.0)], -2.0, {}, {"pg_clipfrac": 0.5}),
    (cispo, [1.0, 2.0, 0.5], 3.0, {}, {"pg_clipfrac": 1 / 3}),  # the low side is open
    (plain_gradient, [1.0, 2.0], 3.0, {}, {"ppo_kl": -math.log(2) / 2}),
    (clip_cov, [1.5, 1.5, 1.1], 2.0, {}, {"pg_clipfrac": 1 / 3, "cov_clipfrac": 1 / 3}),
    (kl_cov, [2.0, 0.5, 2.0], 1.0, {"ppo_kl_coef": 0.3}, {"cov_clipfrac": 1 / 3}),
    (dro, [math.exp(2.0)], 3.0, {"dro_beta": 0.5}, {"dro_penalty": 1.0}),
    (draw_to_target, [math.exp(1.0), math.exp(2.0)], 5.0, {}, {"sppo_error": 2.0}),  # Δ is 3, the target 5
]


@pytest.mark.parametrize(("loss", "ratios", "advantage", "keys", "metrics"), METRICS)
def test_metrics(
    loss: Any, ratios: list[float], advantage: float, keys: dict[str, Any], metrics: dict[str, float]
) -> None:
    """Values and gradients are proven against the slow references."""
    if loss in (clip_cov, kl_cov):
        keys = {**keys, f"{loss.__name__}_selected": torch.tensor([[True, False, False]])}
    _, out = apply(loss, [ratios], [[advantage] * len(ratios)], **keys)
    assert {name: fraction(out, name) for name in metrics} == pytest.approx(metrics)


@pytest.mark.parametrize(
    ("p", "p_old", "advantage", "weight"),
    [
        (0.5, 0.4, 1.0, 1.25),  # moved by 0.1: within 0.15
        (0.6, 0.4, 1.0, 0.0),
        (0.6, 0.4, -1.0, 1.5),  # the wrong way, from where it may come back
        (0.1, 0.001, 1.0, 20.0),  # a rare token may grow a hundredfold, its weight to 20
    ],
)
def test_metrics_of_dppo_tv(p: float, p_old: float, advantage: float, weight: float) -> None:
    _, out = apply(dppo_tv, [[p / p_old]], [[advantage]], old=math.log(p_old), clip_low=0.15, clip_high=0.15)
    assert float(out.loss.detach()) == pytest.approx(-advantage * weight * math.log(p))
    assert fraction(out, "pg_clipfrac") == (weight == 0)
    assert fraction(out, "pg_clipfrac_upper") == (weight == 20)


@pytest.mark.parametrize(
    ("p", "p_old", "advantage", "inside"),
    [
        (0.5, 0.4, 1.0, True),  # D = 0.4·log 0.8 + 0.6·log 1.2 = 0.0201
        (0.6, 0.4, 1.0, False),  # 0.4·log ⅔ + 0.6·log 1.5 = 0.0811
        (1.0, 0.99, 1.0, False),  # certain now: D is infinite
        (1.0, 1.0, 1.0, True),
        (0.96, 1.0, -1.0, True),  # −log 0.96 = 0.0408
        (0.9, 1.0, -1.0, False),
    ],
)
def test_dppo_kl_near_certainty(p: float, p_old: float, advantage: float, inside: bool) -> None:
    x, out = apply(dppo_kl, [[p / p_old]], [[advantage]], old=math.log(p_old), clip_low=0.05, clip_high=0.05)
    (slope,) = torch.autograd.grad(out.loss, x)
    assert slope.item() == pytest.approx(-advantage * p / p_old if inside else 0.0)
    assert fraction(out, "pg_clipfrac") == (not inside)


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_a_covariance_loss_says_what_it_lacks(loss: Any) -> None:
    name = loss.__name__
    with pytest.raises(
        ConfigError, match=f"{name} needs {name}_selected .* call select_{name} on the whole mini-batch"
    ):
        apply(loss, [[1.0]], [[1.0]])


def pairs(**keys: Any) -> tuple[Tensor, LossOutput]:
    """Two groups: one good row against two bad ones, and two good ones against nobody; a row of each without
    a sign or a token.
    """
    mask = torch.ones(6, 1, dtype=torch.bool)
    mask[5] = False
    a = f64([[1.0], [-1.0], [-1.0], [1.0], [0.0], [-1.0]])
    x = f64([[-1.0], [-3.0], [-1.0], [-1.0], [-1.0], [-1.0]]).requires_grad_()
    ref, groups = torch.full_like(x, -2.0).detach(), torch.tensor([7, 7, 7, 4, 7, 4])
    inputs = LossInputs(x, x.detach(), a, mask, LossScale.count(mask))
    return x, dpo(inputs, ref_log_prob=ref, group_ids=groups, **keys)


def test_metrics_of_pairs() -> None:
    _, out = pairs(dpo_beta=0.5)
    assert fraction(out, "dpo_accuracy") == 0.5 and fraction(out, "dpo_margin") == pytest.approx(0.5)
    # three rows of five take part
    assert float(out.loss.detach()) == pytest.approx((math.log(1 + math.exp(-1)) + math.log(2)) / 2 * 3 / 5)


def test_of_equals_the_first_is_selected() -> None:
    log_prob = f64([[1.0, -1.0, 0.0, 0.0], [math.nan, 0.0, 0.0, 0.0]])
    a = f64([[2.0, -3.0, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    found = select_kl_cov(log_prob, log_prob, a, ~log_prob.isnan(), torch.Generator(), kl_cov_ratio=4 / 7)
    assert found["kl_cov_selected"].tolist() == [[True] * 4, [False] * 4]
    x, out = apply(kl_cov, [[1.0]], [[0.0]], kl_cov_selected=torch.tensor([[True]]))
    assert not torch.autograd.grad(out.loss, x)[0].any()  # idle where the policy has not moved


def test_no_positive_example_teaches_nothing() -> None:
    x = f64([[-1.0, -2.0], [-4.0, math.nan]]).requires_grad_()
    mask, nobody = ~x.detach().isnan(), torch.zeros(2, dtype=torch.bool)
    loss = positive_example_loss(x, mask, nobody, LossScale.count(mask, nobody))
    assert float(loss.detach()) == 0.0 and not torch.autograd.grad(loss, x)[0].any()


def test_dpo_refuses() -> None:
    with pytest.raises(ConfigError, match="unknown dpo_loss 'hinge': choose from sigmoid, ipo"):
        pairs(dpo_loss="hinge")
    with pytest.raises(ConfigError, match=r"dpo_label_smoothing=0\.1 has no meaning with dpo_loss=ipo"):
        pairs(dpo_loss="ipo", dpo_label_smoothing=0.1)


def some(name: str, dtype: torch.dtype) -> tuple[Tensor, LossOutput]:
    mask = torch.ones(2, 2, dtype=torch.bool)
    x, old, a, weights, ref = (
        torch.tensor([[1.0, -1.0], [-0.5, 0.5]], dtype=dtype).sub(i).requires_grad_() for i in range(5)
    )
    columns = {"ref_log_prob": ref, "group_ids": torch.tensor([0, 0]), f"{name}_selected": mask}
    inputs = LossInputs(x, old, a + 2.2, mask, LossScale.count(mask), weights)
    places, named = POLICY_LOSSES[name].arguments(inputs, columns)
    out = POLICY_LOSSES[name].function(*places, **named)
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
