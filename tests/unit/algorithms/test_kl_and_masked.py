"""KL estimators and controllers, and statistics under a mask, on small cases."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from hybridflow.algorithms.aggregation import masked_mean, masked_sum, masked_var, masked_whiten
from hybridflow.algorithms.kl import AdaptiveKLController, FixedKLController, clamped_tokens, kl_estimate
from hybridflow.errors import ConfigError

X, Y = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -1.5]])


def test_k3_is_clamped_and_junk_outside_the_mask_has_no_effect() -> None:
    x = torch.tensor([[-150.0, math.nan, -1.0]], requires_grad=True)  # e^149 is beyond float32
    y = torch.tensor([[-1.0, math.inf, -1.0]])
    found = kl_estimate(x, y, "k3", torch.tensor([[True, False, True]]))
    assert found.tolist() == [[10.0, 0.0, 0.0]]
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == [[0.0, 0.0, 0.0]]


def test_clamped_tokens_are_those_that_k3_gives_no_gradient() -> None:
    x = torch.tensor([[-2.6, -2.62, -9.0, 10.9, 11.1, 40.0, 0.0]], requires_grad=True)  # from y = 0
    for kind in ("k3", "low_var_kl"):
        value = kl_estimate(x, torch.zeros(1, 7), kind)
        clamped = clamped_tokens(value, kind)
        assert clamped is not None and clamped.tolist() == [[False, True, True, False, True, True, False]]
        gradient = torch.autograd.grad(value.sum(), x)[0]
        assert (gradient[0, :6] == 0).tolist() == clamped[0, :6].tolist()
    for kind in ("k3+", "low_var_kl+", "k1", "abs", "k2", "k2+", "full"):
        assert clamped_tokens(torch.full((1, 2), 30.0), kind) is None


@pytest.mark.parametrize("kind", ["full", "full+", "k4", "", "k3++"])
def test_unknown_estimators_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="unknown KL estimator"):
        kl_estimate(X, Y, kind)


def test_the_fixed_controller_keeps_the_configured_value(caplog: pytest.LogCaptureFixture) -> None:
    controller = FixedKLController(0.01)
    controller.update(5.0, 100)
    with caplog.at_level(logging.WARNING):
        controller.load_state_dict(controller.state_dict())
        assert not caplog.text  # nothing to say where the checkpoint has the same
        controller.load_state_dict({"value": 0.5})
    assert controller.value == 0.01 and "0.5" in caplog.text and controller.state_dict() == {"value": 0.01}


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.11, 1 + 0.1 * 0.01), (10.0, 1 + 0.2 * 0.01), (0.0, 1 - 0.2 * 0.01), (0.1, 1.0)]
)
def test_the_adaptive_controller_moves_towards_the_target(kl: float, factor: float) -> None:
    controller = AdaptiveKLController(0.2, target=0.1, horizon=10_000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_adaptive_controller_resumes_and_survives_nan() -> None:
    controller = AdaptiveKLController(0.2)
    controller.update(1.0, 500)
    resumed = AdaptiveKLController(0.2)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(math.nan, 500)
    assert resumed.value == controller.value != 0.2
    with pytest.raises(ConfigError):
        AdaptiveKLController(0.2, target=0.0)


def test_masked_statistics_ignore_junk() -> None:
    x = torch.tensor([[1.0, math.nan], [3.0, math.inf]])
    mask = torch.tensor([[True, False], [True, False]])
    assert [float(f(x, mask)) for f in (masked_sum, masked_mean, masked_var)] == [4.0, 2.0, 2.0]
    assert masked_mean(x, mask, dim=-1).tolist() == [1.0, 3.0]
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]) / 2**0.5)


def test_masked_statistics_of_one_token_and_of_none() -> None:
    x = torch.tensor([[4.0, 5.0]])
    for mask, mean in (([[True, False]], 4.0), ([[False, False]], 0.0)):
        where = torch.tensor(mask)
        assert float(masked_mean(x, where)) == mean and float(masked_var(x, where)) == 0.0
        assert masked_whiten(x, where).tolist() == [[0.0, 0.0]]
