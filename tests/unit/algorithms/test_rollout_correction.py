"""Rollout correction on cases small enough for paper and pencil, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from corrections_by_keys import correction_metrics, rejection, rollout_weights
from hybridflow.algorithms import rollout_correction as maths
from hybridflow.config.thresholds import OPTIONS, RejectionRule, parse_is_threshold, parse_rejection
from hybridflow.errors import ConfigError

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
RATIOS = torch.tensor([[4.0, 0.5, math.nan], [1.0, math.inf, 7.0], [math.nan, 1.0, 0.0]])
"""π_old/π_rollout."""
ROLLOUT = torch.full((3, 3), math.log(0.25))
OLD = ROLLOUT + RATIOS.log()


def test_weights_that_are_all_dropped_stay_zero_where_they_are_normalised() -> None:
    found = rollout_weights(OLD, ROLLOUT, MASK, level="token", threshold="90_100", batch_normalize=True)
    assert found.dtype == torch.float32 and not found.any()


def test_the_mean_of_normalised_weights_is_over_the_rows_it_is_told() -> None:
    # the second row is trained on but not counted, as a row that was sampled by another policy
    counted = torch.tensor([[True], [False], [True]]).expand(MASK.shape)
    by_token, by_row = (
        rollout_weights(
            OLD, ROLLOUT, MASK, level=level, threshold=8.0, batch_normalize=True, normalize_over=counted
        )
        for level in ("token", "sequence")
    )
    # token: the mean of 4 and ½ is 9/4; sequence: the first row's weight is 4 · ½ = 2
    torch.testing.assert_close(by_token[0], torch.tensor([4.0, 0.5, 0.0]) / 2.25)
    torch.testing.assert_close(by_token[1], torch.tensor([1.0, 0.0, 0.0]) / 2.25)
    torch.testing.assert_close(by_row[0], torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(by_row[1], torch.tensor([0.5, 0.0, 0.0]))


def test_log_ratios_and_their_sums_are_clamped() -> None:
    rollout = torch.full((1, 3), -30.0, dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.tensor([[0.0, -15.0, -60.0]], dtype=torch.float64)
    token = rollout_weights(old, rollout, mask, level="token", threshold=1e12)
    torch.testing.assert_close(token.log(), torch.tensor([[20.0, 15.0, -20.0]], dtype=torch.float64))
    two = torch.tensor([[True, True, False]])
    sequence = rollout_weights(old, rollout, two, level="sequence", threshold=1e12)
    torch.testing.assert_close(sequence[two].log(), torch.full((2,), 20.0, dtype=torch.float64))
    metrics = flat(correction_metrics(old, rollout, two, level="sequence"))
    assert metrics["chi2_seq"] == pytest.approx(math.expm1(40.0))
    assert metrics["rollout_is_max"] == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_no_number_is_rejected(option: str) -> None:
    """Inside the mask, that is; a row that is judged as a whole goes as a whole."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    old = torch.tensor([[math.nan, -1.0], [-1.0, -1.0]])
    keep = rejection(old, torch.full((2, 2), -1.0), mask, options=option, thresholds=2.0)
    assert keep.tolist() == [[False, option.startswith("token")], [True, True]]


def test_equal_policies_have_nothing_to_correct() -> None:
    args = ROLLOUT, ROLLOUT, MASK
    for level in ("token", "sequence"):
        torch.testing.assert_close(
            rollout_weights(*args, level=level, threshold=2.0, batch_normalize=True), MASK.float()
        )
    for option in OPTIONS:
        assert torch.equal(rejection(*args, options=option, thresholds=1.001), MASK)
    metrics = flat(correction_metrics(*args))
    assert metrics.pop("training_ppl") == metrics.pop("rollout_ppl") == pytest.approx(4.0)
    ones = ("ppl_ratio", "rollout_is_mean", "rollout_is_min", "rollout_is_max", "rollout_is_eff_sample_size")
    assert all(metrics.pop(name) == pytest.approx(1.0) for name in ones)
    assert metrics == dict.fromkeys(metrics, 0.0)


def flat(metrics: dict[str, tuple[Tensor, Tensor] | float]) -> dict[str, float]:
    assert all(name.startswith("rollout_corr/") for name in metrics)
    named = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    return {name: float(v[0]) / float(v[1]) if isinstance(v, tuple) else v for name, v in named.items()}


def test_without_the_spread_only_what_adds_up_is_left() -> None:
    whole = correction_metrics(OLD, ROLLOUT, MASK)
    parts = correction_metrics(OLD, ROLLOUT, MASK, spread=False)
    assert set(whole) - set(parts) == {
        f"rollout_corr/rollout_is_{name}" for name in ("std", "min", "max", "eff_sample_size")
    }
    assert all(isinstance(value, tuple) for value in parts.values())
    assert flat(parts) == {name: value for name, value in flat(whole).items() if name in flat(parts)}


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (2.0, (None, 2.0)),
        (3, (None, 3.0)),
        ("1e3", (None, 1000.0)),
        ("0.5_5", (0.5, 5.0)),
        ("0_inf", (0.0, math.inf)),
    ],
)
def test_threshold_of_weights(threshold: float | str, expected: tuple[float | None, float]) -> None:
    assert parse_is_threshold(threshold) == expected


@pytest.mark.parametrize(
    "threshold", [0.0, -1.0, math.nan, "", "two", "2_1", "1_1", "-1_2", "0.5_2.0_3.0", "0.5_", "0.5,2.0"]
)
def test_threshold_of_weights_is_refused(threshold: float | str) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout_is_threshold got .*: set a number above 0 .* or 'lo_hi' with 0 ≤ lo < hi"
    ):
        rollout_weights(OLD, ROLLOUT, MASK, level="token", threshold=threshold)


def test_level_is_refused() -> None:
    for call in (
        lambda: rollout_weights(OLD, ROLLOUT, MASK, level="turn", threshold=2.0),
        lambda: correction_metrics(OLD, ROLLOUT, MASK, level="turn"),
    ):
        with pytest.raises(ConfigError, match="rollout_is got 'turn': set token or sequence, or null"):
            call()


def test_rules_of_rejection() -> None:
    low, high = pytest.approx(-math.log(2)), pytest.approx(math.log(2))
    assert parse_rejection("token_k1 ,seq_max_k3,seq_mean_k1", "0.5_4 , 0.01,2") == [
        RejectionRule("token", "k1", low, pytest.approx(math.log(4))),
        RejectionRule("seq_max", "k3", -math.inf, 0.01),
        RejectionRule("seq_mean", "k1", low, high),
    ]
    assert parse_rejection("token_k2", 0.5) == [RejectionRule("token", "k2", -math.inf, 0.5)]
    assert len(OPTIONS) == len(set(OPTIONS)) == 11


@pytest.mark.parametrize(
    ("options", "thresholds", "message"),
    [
        ("", 2.0, "no option '': set a comma list of token_k1, "),
        ("seq_max_k1", 2.0, "no option 'seq_max_k1'"),
        ("token_k1,", "2.0,2.0", "no option ''"),
        ("geometric", 2.0, "no option 'geometric'"),
        ("token_k1", None, "has 1 options, but rollout_rs_threshold=None has 0 thresholds: set one for each"),
        ("token_k1,token_k2", 2.0, "has 2 options, but rollout_rs_threshold=2.0 has 1 thresholds"),
        ("token_k1", "2.0,0.1", "has 1 options, but rollout_rs_threshold=2.0,0.1 has 2"),
        ("token_k1", 0.5, "got '0.5' for token_k1: set 'lo_hi' with 0 < lo < hi, .* u above 1"),
        ("token_k1", "1", "got '1' for token_k1"),
        ("seq_sum_k1", "0_2", "got '0_2' for seq_sum_k1"),
        ("seq_sum_k1", "2_0.5", "got '2_0.5' for seq_sum_k1"),
        ("seq_mean_k1", "high", "got 'high' for seq_mean_k1"),
        (
            "token_k1,token_k2",
            "2.0,0.1_0.2",
            "got '0.1_0.2' for token_k2: set one number above 0, the upper bound",
        ),
        ("seq_max_k3", "0", "got '0' for seq_max_k3"),
        ("seq_max_k3", "-1", "got '-1' for seq_max_k3"),
        ("token_k3", "nan", "got 'nan' for token_k3"),
    ],
)
def test_rejection_is_refused(options: str, thresholds: float | str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rejection(OLD, ROLLOUT, MASK, options=options, thresholds=thresholds)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_spread_of_ratios_from_the_sums_of_parts(scale: float) -> None:
    draw = torch.Generator().manual_seed(4)
    rollout = -torch.rand(6, 5, generator=draw)
    old = rollout + scale * torch.randn(6, 5, generator=draw)
    mask = torch.rand(6, 5, generator=draw) < 0.7
    parts = [maths.deviation_sums(old[rows], rollout[rows], mask[rows]) for rows in ([0, 1], [2], [3, 4, 5])]
    total, squares = (float(sum(sums)) for sums in zip(*parts, strict=True))
    ratios = (old.double() - rollout.double())[mask].exp()
    found = maths.spread_of_deviations(total, squares, float(mask.sum()))
    assert found["rollout_corr/rollout_is_std"] == pytest.approx(float(ratios.std()), rel=1e-9)
    size = float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-12)


def test_the_spread_of_one_ratio_is_none() -> None:
    found = maths.spread_of_deviations(0.5, 0.25, 1.0)
    assert found == {
        "rollout_corr/rollout_is_std": 0.0,
        "rollout_corr/rollout_is_eff_sample_size": pytest.approx(1.0),
    }
