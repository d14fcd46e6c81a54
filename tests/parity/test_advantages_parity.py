"""Estimators against the slow references, to 1e-9 in float64, on ragged batches with junk outside masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference_advantages as slow
import reference_maths as reference
import torch
from estimator_columns import every_column
from ragged_batches import Ragged, each_seed, ragged
from torch import Tensor

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, Advantages
from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.gdpo import gdpo
from hybridflow.algorithms.advantages.prime import prime
from hybridflow.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline
from hybridflow.algorithms.aggregation import masked_whiten

Columns = dict[str, Any]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def close(found: Tensor, expected: reference.Rows) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **EXACT)


def estimate(name: str, columns: Columns) -> Advantages:
    return ADVANTAGE_ESTIMATORS[name](columns)


def lists(columns: Columns, *names: str) -> list[Any]:
    return [columns[name].tolist() for name in names]


GROUPED = ("token_level_rewards", "response_mask", "group_ids")
BASELINE = (*GROUPED, "old_log_probs", "sum_pi_squared")

# estimator -> its reference's advantages, where the returns are the advantages too
BY_ROW: dict[str, Callable[[Columns], reference.Rows]] = {
    "grpo": lambda c: reference.grpo(*lists(c, *GROUPED), c["norm_by_std"]),
    "grpo_passk": lambda c: slow.grpo_passk(*lists(c, *GROUPED), c["norm_by_std"]),
    "gdpo": lambda c: slow.gdpo(
        *lists(c, "reward_components", "response_mask", "group_ids"),
        c["gdpo_reward_weights"],
        c["loss_mask"].tolist(),
    ),
    "rloo": lambda c: slow.rloo(*lists(c, *GROUPED)),
    "reinforce_plus_plus_baseline": lambda c: slow.reinforce_plus_plus_baseline(
        *lists(c, *GROUPED, "loss_mask")
    ),
    "opo": lambda c: slow.opo(*lists(c, *GROUPED)),
    "gpg": lambda c: slow.gpg(*lists(c, *GROUPED)),
    "max_rl": lambda c: slow.max_rl(*lists(c, *GROUPED)),
    "sppo": lambda c: slow.sppo(*lists(c, *GROUPED), c["sppo_eta"], c["sppo_beta"]),
    "online_dpo": lambda c: slow.online_dpo(*lists(c, *GROUPED, "row_id")),
    "spin": lambda c: slow.spin(*lists(c, "response_mask", "is_demonstration", "group_ids")),
    "on_policy_distillation": lambda c: slow.on_policy_distillation(
        *lists(c, "old_log_probs", "teacher_log_probs", "response_mask")
    ),
}

# estimator -> its reference's advantages and returns
BY_TOKEN: dict[str, Callable[[Columns], tuple[reference.Rows, reference.Rows]]] = {
    "remax": lambda c: (
        slow.remax(*lists(c, "token_level_rewards", "response_mask", "reward_baselines")),
        slow.to_go(*lists(c, "token_level_rewards", "response_mask"), 1.0),
    ),
    "optimal_token_baseline": lambda c: slow.optimal_token_baseline(
        *lists(c, *BASELINE, "rollout_is_weights")
    ),
    "tir_optimal_token_baseline": lambda c: slow.tir_optimal_token_baseline(
        *lists(c, *BASELINE, "rollout_is_weights")
    ),
    "prime": lambda c: slow.prime(
        *lists(c, "process_rewards", *GROUPED), c["process_coef"], c["outcome_coef"], c["loss_mask"].tolist()
    ),
}


def test_every_estimator_has_a_reference() -> None:
    assert {*BY_ROW, *BY_TOKEN, "gae", "reinforce_plus_plus"} == set(ADVANTAGE_ESTIMATORS)


@each_seed
@pytest.mark.parametrize("name", BY_ROW)
def test_one_advantage_a_row(name: str, seed: int) -> None:
    for change in (
        {},
        {"norm_by_std": False, "sppo_eta": 0.3, "sppo_beta": 0.1, "gdpo_reward_weights": [0.2, -1.5, 3.0]},
    ):
        columns = every_column(seed, signed=name != "max_rl") | change
        out = estimate(name, columns)
        # spin is given no float
        close(out.advantages.double() if name == "spin" else out.advantages, BY_ROW[name](columns))
        assert torch.equal(out.returns, out.advantages) and out.returns is not out.advantages
        assert bool(out.advantages.any())  # the batch says something to each of them


@each_seed
@pytest.mark.parametrize("name", BY_TOKEN)
def test_one_advantage_a_token(name: str, seed: int) -> None:
    columns = every_column(seed)
    out, (advantages, returns) = estimate(name, columns), BY_TOKEN[name](columns)
    close(out.advantages, advantages)
    close(out.returns, returns)


@each_seed
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline_without_importance_weights(name: str, seed: int) -> None:
    columns = every_column(seed)
    del columns["rollout_is_weights"]
    form = getattr(slow, name)
    close(estimate(name, columns).advantages, form(*lists(columns, *BASELINE), None)[0])


@each_seed
def test_whitening_without_a_loss_mask_is_over_the_sampled_tokens(seed: int) -> None:
    c = every_column(seed)
    rewards, mask, groups = lists(c, *GROUPED)
    out = reinforce_plus_plus_baseline(c["token_level_rewards"], c["response_mask"], c["group_ids"])
    close(out.advantages, slow.reinforce_plus_plus_baseline(rewards, mask, groups, mask))
    out = gdpo(c["reward_components"], c["response_mask"], c["group_ids"])
    close(out.advantages, slow.gdpo(c["reward_components"].tolist(), mask, groups, [1.0, 1.0, 1.0], mask))
    out = prime(
        c["process_rewards"],
        c["token_level_rewards"],
        c["response_mask"],
        c["group_ids"],
        process_coef=5.0,
        outcome_coef=5.0,
    )
    close(out.advantages, slow.prime(c["process_rewards"].tolist(), rewards, mask, groups, 5.0, 5.0, mask)[0])


@each_seed
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus(seed: int, gamma: float) -> None:
    columns = every_column(seed) | {"gamma": gamma}
    returns = slow.to_go(*lists(columns, "token_level_rewards", "response_mask"), gamma)
    for mask in ("loss_mask", "response_mask"):
        out = estimate(
            "reinforce_plus_plus",
            columns if mask == "loss_mask" else {k: v for k, v in columns.items() if k != "loss_mask"},
        )
        close(out.returns, returns)
        close(out.advantages, reference.whiten(returns, columns[mask].tolist()))


@each_seed
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae(seed: int, gamma: float, lam: float) -> None:
    b = ragged(seed)
    out = gae(b.rewards, b.values, b.mask, gamma=gamma, lam=lam)
    advantages, returns = reference.gae(b.rewards.tolist(), b.values.tolist(), b.mask.tolist(), gamma, lam)
    close(out.returns, returns)
    close(out.advantages, reference.whiten(advantages, b.mask.tolist()))


@each_seed
def test_gae_whitens_over_the_loss_mask_only(seed: int) -> None:
    b = ragged(seed)
    loss_mask = b.mask & (torch.arange(b.mask.shape[0]) != 3).unsqueeze(1)
    out = gae(b.rewards, b.values, b.mask, gamma=0.99, lam=0.9, loss_mask=loss_mask)
    advantages, returns = reference.gae(b.rewards.tolist(), b.values.tolist(), b.mask.tolist(), 0.99, 0.9)
    close(out.returns, returns)
    close(out.advantages, reference.whiten(advantages, loss_mask.tolist()))


def by_length(b: Ragged, gamma: float, alpha: float) -> reference.Rows:
    """GAE row by row, each with the λ of its own length."""
    out = []
    for rewards, values, mask in zip(b.rewards.tolist(), b.values.tolist(), b.mask.tolist(), strict=True):
        lam = min(max(1 - 1 / (alpha * sum(mask)), 0.0), 1.0) if any(mask) else 0.0
        out += reference.gae([rewards], [values], [mask], gamma, lam)[0]
    return out


@each_seed
@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 1e9])
@pytest.mark.parametrize("lam_critic", [None, 1.0, 0.7])
def test_vapo(seed: int, alpha: float, lam_critic: float | None) -> None:
    b = ragged(seed)
    out = gae(b.rewards, b.values, b.mask, gamma=0.99, lam=0.9, lam_critic=lam_critic, lam_length_alpha=alpha)
    critics_lam = 0.9 if lam_critic is None else lam_critic
    _, returns = reference.gae(b.rewards.tolist(), b.values.tolist(), b.mask.tolist(), 0.99, critics_lam)
    close(out.returns, returns)
    close(out.advantages, reference.whiten(by_length(b, 0.99, alpha), b.mask.tolist()))


@each_seed
def test_whitening(seed: int) -> None:
    b = ragged(seed)
    close(masked_whiten(b.rewards, b.mask), reference.whiten(b.rewards.tolist(), b.mask.tolist()))
