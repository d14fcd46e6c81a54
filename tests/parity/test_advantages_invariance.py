"""What must not change an advantage: order, padding, junk, a split into groups, a shift or scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from estimator_columns import ROWS, every_column
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, Advantages

Columns = dict[str, Any]
EXACT = {"rtol": 1e-9, "atol": 1e-9}
FEW = settings(max_examples=8, deadline=None, derandomize=True)
SEED = st.integers(0, 10_000)

WHITENED = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "prime"}
WHOLE_BATCH = WHITENED | {"gpg"}
"""These look beyond the group, and so are computed on the whole batch before it is split."""

each = pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)


def columns_of(name: str, seed: int) -> Columns:
    return every_column(seed, signed=name != "max_rl")


def estimate(name: str, columns: Columns) -> Advantages:
    return ADVANTAGE_ESTIMATORS[name](columns)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **EXACT)


def rows(columns: Columns, chosen: list[int] | Tensor) -> Columns:
    return {name: x[chosen] if isinstance(x, Tensor) else x for name, x in columns.items()}


def padded(columns: Columns, left: int, right: int, fill: float) -> Columns:
    """More positions on both sides, outside every mask, with junk."""

    def pad(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] != columns["response_mask"].shape[1]:
            return x
        return torch.nn.functional.pad(x, (left, right), value=False if x.dtype == torch.bool else fill)

    return {name: pad(x) for name, x in columns.items()}


def end_rewards(columns: Columns, shift: float = 0.0, scale: float = 1.0) -> Columns:
    """Every score s becomes scale·s + shift, the shift given on the last sampled token."""
    mask = columns["response_mask"]
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return columns | {"token_level_rewards": columns["token_level_rewards"] * scale + last.double() * shift}


@each
@FEW
@given(SEED, st.permutations(range(ROWS)))
def test_the_order_of_rows_does_not_matter(name: str, seed: int, order: list[int]) -> None:
    columns = columns_of(name, seed)
    plain, moved = estimate(name, columns), estimate(name, rows(columns, order))
    same(moved.advantages, plain.advantages[order])
    same(moved.returns, plain.returns[order])


@each
@FEW
@given(
    SEED,
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
)
def test_padding_does_not_matter(name: str, seed: int, left: int, right: int, fill: float) -> None:
    columns = columns_of(name, seed)
    plain, wider = estimate(name, columns), estimate(name, padded(columns, left, right, fill))
    width = columns["response_mask"].shape[1]
    for found, expected in ((wider.advantages, plain.advantages), (wider.returns, plain.returns)):
        same(found[:, left : left + width], expected)
        assert not found[:, :left].any() and not found[:, left + width :].any()


@each
@FEW
@given(SEED)
def test_what_stands_outside_the_mask_does_not_matter(name: str, seed: int) -> None:
    columns = columns_of(name, seed)
    mask = columns["response_mask"]
    clean = {
        key: torch.where(mask, x, 0.0)
        if isinstance(x, Tensor) and x.shape == mask.shape and x.dtype == torch.float64
        else x
        for key, x in columns.items()
    }
    clean["reward_components"] = columns["reward_components"].nan_to_num(0.0)
    junk, tidy = estimate(name, columns), estimate(name, clean)
    assert torch.equal(junk.advantages, tidy.advantages) and torch.equal(junk.returns, tidy.returns)
    assert not junk.advantages[~mask].any() and not junk.returns[~mask].any()


def split(columns: Columns, ranks: list[int]) -> list[Tensor]:
    """Row numbers of each rank; all rows of a group are on one."""
    names = columns["group_ids"].unique().tolist()
    home = torch.tensor([ranks[names.index(group)] for group in columns["group_ids"].tolist()])
    return [part for rank in range(3) if len(part := (home == rank).nonzero().squeeze(-1))]


RANKS = st.lists(st.integers(0, 2), min_size=5, max_size=5)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - WHOLE_BATCH))
@FEW
@given(SEED, RANKS)
def test_ranks_that_hold_whole_groups_find_the_same(name: str, seed: int, ranks: list[int]) -> None:
    columns = columns_of(name, seed)
    whole = estimate(name, columns)
    for part in split(columns, ranks):
        alone = estimate(name, rows(columns, part))
        same(alone.advantages, whole.advantages[part])
        same(alone.returns, whole.returns[part])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "prime"])
@FEW
@given(SEED, RANKS)
def test_returns_come_before_whitening_and_know_no_other_rank(name: str, seed: int, ranks: list[int]) -> None:
    columns = columns_of(name, seed)
    whole = estimate(name, columns)
    for part in split(columns, ranks):
        same(estimate(name, rows(columns, part)).returns, whole.returns[part])


@pytest.mark.parametrize("name", sorted(WHOLE_BATCH))
@FEW
@given(SEED, RANKS)
def test_another_batch_changes_only_one_scale_and_one_offset(name: str, seed: int, ranks: list[int]) -> None:
    columns = columns_of(name, seed)
    whole = estimate(name, columns).advantages
    for part in split(columns, ranks):
        alone = estimate(name, rows(columns, part)).advantages
        kept = (alone != 0) & (whole[part] != 0)
        y, x = alone[kept], whole[part][kept]
        if len(y) > 2 and float(x.max() - x.min()) > 1e-3:
            slope = (y[x.argmax()] - y[x.argmin()]) / (x.max() - x.min())
            torch.testing.assert_close(y, y[x.argmin()] + slope * (x - x.min()), rtol=1e-6, atol=1e-6)


SHIFT = st.floats(-20, 20)
SCALE = st.floats(0.1, 10)


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "prime",
        "sppo",
        "online_dpo",
    ],
)
@FEW
@given(SEED, SHIFT)
def test_a_shift_of_all_scores_does_not_matter(name: str, seed: int, shift: float) -> None:
    columns = columns_of(name, seed)
    plain, shifted = estimate(name, columns), estimate(name, end_rewards(columns, shift))
    torch.testing.assert_close(shifted.advantages, plain.advantages, rtol=1e-7, atol=1e-7)


@FEW
@given(SEED, SHIFT)
def test_remax_moves_with_its_baseline(seed: int, shift: float) -> None:
    columns = every_column(seed)
    shifted = end_rewards(columns, shift) | {"reward_baselines": columns["reward_baselines"] + shift}
    same(estimate("remax", shifted).advantages, estimate("remax", columns).advantages)


@FEW
@given(SEED, st.tuples(SHIFT, SHIFT, SHIFT), st.tuples(SCALE, SCALE, SCALE))
def test_gdpo_knows_no_unit_of_a_reward(
    seed: int, shifts: tuple[float, ...], scales: tuple[float, ...]
) -> None:
    columns = every_column(seed)
    other = columns["reward_components"] * torch.tensor(scales, dtype=torch.float64) + torch.tensor(
        shifts, dtype=torch.float64
    )
    found = estimate("gdpo", columns | {"reward_components": other}).advantages
    # but for the 1e-6 beside σ
    torch.testing.assert_close(found, estimate("gdpo", columns).advantages, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "grpo_passk",
        "rloo",
        "opo",
        "gpg",
        "remax",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ],
)
@FEW
@given(SEED, SCALE)
def test_advantages_are_in_units_of_the_score(name: str, seed: int, scale: float) -> None:
    columns = every_column(seed) | {"norm_by_std": False}
    scaled = end_rewards(columns, scale=scale) | {"reward_baselines": columns["reward_baselines"] * scale}
    same(estimate(name, scaled).advantages, estimate(name, columns).advantages * scale)


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "grpo_passk",
        "gae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "prime",
        "max_rl",
        "online_dpo",
    ],
)
@FEW
@given(SEED, SCALE)
def test_a_scale_of_all_scores_does_not_matter(name: str, seed: int, scale: float) -> None:
    columns = columns_of(name, seed)
    scaled = end_rewards(columns, scale=scale)
    for column in ("values", "process_rewards"):
        scaled[column] = columns[column] * scale
    found, expected = estimate(name, scaled).advantages, estimate(name, columns).advantages
    # but for the 1e-6 and 1e-8 beside deviations
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@FEW
@given(SEED, SCALE)
def test_sppo_has_scores_in_units_of_one_over_beta(seed: int, scale: float) -> None:
    columns = every_column(seed)
    scaled = end_rewards(columns, scale=scale) | {"sppo_beta": columns["sppo_beta"] / scale}
    same(estimate("sppo", scaled).advantages, estimate("sppo", columns).advantages * scale)
