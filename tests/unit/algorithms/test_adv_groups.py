"""Estimators that compare the responses of one prompt, on cases small enough for paper and pencil."""

from __future__ import annotations

import math

import pytest
import torch
from estimators_of_groups import BY_SCORE
from torch import Tensor

from hybridflow.algorithms.advantages import Advantages
from hybridflow.algorithms.advantages.gdpo import gdpo
from hybridflow.algorithms.advantages.groups import group_best
from hybridflow.algorithms.advantages.grpo_passk import grpo_passk
from hybridflow.algorithms.advantages.max_rl import max_rl
from hybridflow.algorithms.advantages.online_dpo import online_dpo
from hybridflow.algorithms.advantages.opo import opo
from hybridflow.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline
from hybridflow.algorithms.advantages.sppo import sppo
from hybridflow.errors import ConfigError

NAN = float("nan")


def rows(*values: float, lengths: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """One row a score, given on its last token; two tokens a row unless said otherwise; NaN outside."""
    lengths = lengths or (2,) * len(values)
    rewards = torch.full((len(values), max(lengths)), NAN, dtype=torch.float64)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        rewards[i, :length] = 0.0
        if length:
            rewards[i, length - 1] = value
    return rewards, mask


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def first_tokens(out: Advantages) -> list[float]:
    assert torch.equal(out.returns, out.advantages) and out.returns is not out.advantages
    return out.advantages[:, 0].tolist()


def test_opo_keeps_small_differences_of_large_scores_in_float32() -> None:
    rewards, mask = rows(1e6 + 1, 1e6, lengths=(7, 3))  # baseline 1e6 + 0.7, which float32 cannot hold
    assert first_tokens(opo(rewards.float(), mask, ids(0, 0))) == pytest.approx([0.3, -0.7], abs=1e-6)


def test_max_rl_does_not_divide_by_a_mean_that_rounds_to_zero() -> None:
    rewards, mask = rows(5e-324, 0.0)
    assert first_tokens(max_rl(rewards, mask, ids(0, 0))) == [0.0, 0.0]


def test_max_rl_refuses_scores_below_zero_but_not_in_rows_that_do_not_count() -> None:
    rewards, mask = rows(1.0, -0.5, -0.25)
    with pytest.raises(ConfigError, match=r"max_rl needs scores of 0 or more, got -0\.5 \(rows below 0: 2\)"):
        max_rl(rewards, mask, ids(0, 0, 0))
    mask[1:] = False
    assert first_tokens(max_rl(rewards, mask, ids(0, 0, 0))) == [0.0, 0.0, 0.0]


def test_passk_of_two_best_rows_is_zero() -> None:
    rewards, mask = rows(5.0, 1.0, 5.0)
    assert first_tokens(grpo_passk(rewards, mask, ids(0, 0, 0), norm_by_std=True)) == [0.0, 0.0, 0.0]


def test_whitening_moves_no_group_that_does_not_vary() -> None:
    # centred tokens −1, 1, 1, 1, 0, 0: their mean is not 0
    rewards, mask = rows(0.0, 2.0, 4.0, 4.0, lengths=(1, 3, 1, 1))
    groups = ids(0, 0, 1, 1)
    for out in (
        reinforce_plus_plus_baseline(rewards, mask, groups),
        gdpo(torch.tensor([[0.0], [2.0], [4.0], [4.0]]), mask, groups),
    ):
        assert out.advantages[0, 0] < 0 < out.advantages[1, 0]
        assert out.advantages[2:].tolist() == [[0.0] * 3] * 2


def test_gdpo_weighs_its_rewards() -> None:
    components = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    first = gdpo(components, mask, ids(0, 0), gdpo_reward_weights=[1.0, 0.0]).advantages
    torch.testing.assert_close(first[:, 0], torch.tensor([1.0, -1.0]) / 2**0.5, rtol=1e-5, atol=1e-5)
    second = gdpo(components, mask, ids(0, 0), gdpo_reward_weights=[0.0, 2.0]).advantages
    torch.testing.assert_close(second, -first)
    assert gdpo(components, mask, ids(0, 0), gdpo_reward_weights=[0.5, 0.5]).advantages.abs().max() < 1e-6
    with pytest.raises(ConfigError, match="gdpo_reward_weights has 3 numbers for 2 rewards"):
        gdpo(components, mask, ids(0, 0), gdpo_reward_weights=[1.0, 1.0, 1.0])


def test_sppo_aims_at_the_distance_from_the_softmean() -> None:
    rewards, mask = rows(0.0, math.log(3.0), 8.0)  # softmean_1 of 0 and log 3 is log((1 + 3)/2) = log 2
    found = first_tokens(sppo(rewards, mask, ids(0, 0, 1), sppo_eta=2.0, sppo_beta=1.0))
    assert found == pytest.approx([-2 * math.log(2), 2 * math.log(1.5), 0.0], abs=1e-12)
    sharp = first_tokens(sppo(rewards * 1e6, mask, ids(0, 0, 1), sppo_eta=1.0, sppo_beta=10.0))
    # no overflow: nearly the maximum
    assert sharp[1] == pytest.approx(math.log(2) / 10, abs=1e-6) and math.isfinite(sharp[0])


def test_online_dpo_breaks_ties_by_row_id() -> None:
    rewards, mask = rows(1.0, 3.0, 3.0, 1.0)
    assert first_tokens(online_dpo(rewards, mask, ids(0, 0, 0, 0))) == [-1.0, 1.0, 0.0, 0.0]
    assert first_tokens(online_dpo(rewards, mask, ids(0, 0, 0, 0), row_id=ids(9, 8, 7, 6))) == [
        0.0,
        0.0,
        1.0,
        -1.0,
    ]


def test_the_best_row_is_one_that_counts() -> None:
    best = group_best(
        torch.tensor([9.0, 1.0, 2.0, 5.0]), torch.tensor([False, True, True, False]), ids(0, 0, 0, 1)
    )
    assert best.tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", BY_SCORE)
def test_a_row_alone_and_a_group_of_equal_scores_get_exactly_zero(name: str) -> None:
    values = (5.0, *[0.1] * 7, 0.0, 1.0)
    rewards, mask = rows(*values, lengths=(2, 1, 2, 3, 1, 2, 3, 1, 2, 2))
    for dtype in (torch.float32, torch.float64):
        out = BY_SCORE[name](rewards.to(dtype), mask, ids(0, *[1] * 7, 2, 2)).advantages
        assert out.dtype == dtype and bool((out[:8] == 0).all()) and out[9, 0] > 0 >= out[8, 0]


@pytest.mark.parametrize("name", BY_SCORE)
def test_no_rows_no_columns_and_no_tokens(name: str) -> None:
    for shape in ((0, 3), (2, 0), (2, 3)):
        out = BY_SCORE[name](
            torch.full(shape, NAN),
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape[0], dtype=torch.int64),
        )
        assert out.advantages.shape == shape and not out.advantages.any()


@pytest.mark.parametrize("name", BY_SCORE)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    rewards, mask = rows(1.0, 2.0)
    assert BY_SCORE[name](rewards.to(torch.bfloat16), mask, ids(0, 0)).advantages.dtype == torch.float32


@pytest.mark.parametrize("name", sorted({*BY_SCORE} - {"max_rl", "online_dpo"}))
def test_a_large_offset_of_all_scores_changes_no_advantage(name: str) -> None:
    scores = [k / 8 for k in (0, 3, 5, 1, 9, 7, 2)]  # with the offset still exact in float32
    groups = ids(0, 0, 0, 0, 0, 1, 1)
    rewards, mask = rows(*scores)
    offset, _ = rows(*(score + 1e5 for score in scores))
    wanted = BY_SCORE[name](rewards, mask, groups).advantages
    found = BY_SCORE[name](offset.float(), mask, groups).advantages
    assert found.dtype == torch.float32 and bool(wanted.any())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)
