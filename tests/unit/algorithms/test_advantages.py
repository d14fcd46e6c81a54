"""Estimators on cases small enough for paper and pencil, and their table."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    Advantages,
    register_adv_est,
)
from hybridflow.algorithms.advantages.gae import gae
from hybridflow.errors import ConfigError


@pytest.mark.parametrize("mask", [[[False, False]], [[True, False]], [[False, True]]])
def test_gae_whitens_nothing_or_one_token_to_zero(mask: list[list[bool]]) -> None:
    out = gae(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor(mask), gamma=1.0, lam=1.0)
    assert out.advantages.tolist() == [[0.0, 0.0]] and out.returns.tolist() == [[float(m) for m in mask[0]]]


def test_gae_of_equal_advantages_is_zero_in_float32() -> None:
    # without float64 inside, the rounding of 0.1·k would come out of rsqrt(1e-8) ten thousand times larger
    rewards = torch.full((64, 1), 1000.1)
    out = gae(rewards, torch.zeros(64, 1), torch.ones(64, 1, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert float(out.advantages.abs().max()) < 1e-6


def test_gae_of_half_precision_is_computed_in_float32() -> None:
    half = torch.ones(1, 2, dtype=torch.bfloat16)
    assert gae(half, half, half.bool(), gamma=1.0, lam=1.0).advantages.dtype == torch.float32


def scores(*values: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One row a score, given on the last of two tokens."""
    rewards = torch.zeros(len(values), 2)
    rewards[:, 1] = torch.tensor(values)
    return rewards, torch.ones(len(values), 2, dtype=torch.bool)


def test_an_entry_takes_what_it_names_out_of_all_there_is() -> None:
    rewards, mask = scores(1.0, 3.0)
    everything = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "gamma": 1.0,
    }
    out = ADVANTAGE_ESTIMATORS["grpo"]({**everything, "norm_by_std": False})
    assert out.advantages[:, 0].tolist() == [-1.0, 1.0]
    with pytest.raises(ConfigError, match="gae needs values, lam; there are gamma, group_ids"):
        ADVANTAGE_ESTIMATORS["gae"](everything)


def test_a_user_can_register_one_but_not_take_a_name() -> None:
    @register_adv_est("of_mine")
    def mine(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        group_ids: torch.Tensor,
        *,
        scale: float = 2.0,
        **rest: object,
    ):
        assert set(rest) == {"old_log_probs"}
        return token_level_rewards * scale, token_level_rewards

    try:
        rewards, mask = scores(1.0, 3.0)
        fields = {
            "token_level_rewards": rewards,
            "response_mask": mask,
            "group_ids": torch.zeros(2),
            "old_log_probs": rewards,
        }
        out = ADVANTAGE_ESTIMATORS["of_mine"](fields)
        assert isinstance(out, Advantages) and torch.equal(out.advantages, rewards * 2)
        assert ADVANTAGE_ESTIMATORS["of_mine"].needs == ("token_level_rewards", "response_mask", "group_ids")
        for taken in ("gae", "of_mine"):
            with pytest.raises(ConfigError, match=f"'{taken}' exists already"):
                register_adv_est(taken)(mine)
    finally:
        del ADVANTAGE_ESTIMATORS["of_mine"]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "a NoneType"),
        ((torch.zeros(1, 2), torch.zeros(1, 2)), r"a Tensor \(1, 2\) and a Tensor \(1, 2\)"),
        (torch.zeros(2, 2), r"a Tensor \(2, 2\)"),
        ((torch.zeros(2, 2), None), r"a Tensor \(2, 2\) and a NoneType"),
        ((), "nothing"),
    ],
)
def test_an_estimator_that_returns_something_else_is_named(result: object, said: str) -> None:
    def odd(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> object:
        return result

    rewards, mask = scores(1.0, 3.0)
    with pytest.raises(ConfigError, match=rf"odd must return Advantages.*\(2, 2\); it returned {said}$"):
        AdvantageEstimator.of(odd)({"token_level_rewards": rewards, "response_mask": mask})
