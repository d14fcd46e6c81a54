"""Rollout correction against the slow references, to 1e-9 in float64, and what must not change it."""

from __future__ import annotations

import itertools
import math

import pytest
import reference_corrections as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import SEEDS, Ragged, each_seed, ragged
from torch import Tensor

from corrections_by_keys import correction_metrics, rejection, rollout_weights
from hybridflow.algorithms.aggregation import LossScale, Ratio
from hybridflow.algorithms.policy_losses import LossInputs
from hybridflow.algorithms.policy_losses.vanilla import vanilla
from hybridflow.config.thresholds import OPTIONS

EXACT = {"rtol": 1e-9, "atol": 1e-9}
THRESHOLDS: list[tuple[float | str, float | None, float]] = [
    (2.0, None, 2.0),
    (3, None, 3.0),
    ("1.5", None, 1.5),
    ("0.5_2.0", 0.5, 2.0),
    ("0_1.2", 0.0, 1.2),
    (1e12, None, 1e12),
]
BOUNDS = {
    "k1": [("0.8_1.3", 0.8, 1.3), ("1.5", 1 / 1.5, 1.5), ("2", 0.5, 2.0)],
    "k2": [("0.05", 0.0, 0.05), ("250", 0.0, 250.0)],
    "k3": [("0.01", -1e-12, 0.01), ("1e-1", -1e-12, 0.1)],
}
"""Threshold, low, high: of k1 as ratios."""
Rule = tuple[str, str, float, float]
CASES: list[tuple[str, str, Rule]] = [
    (option, text, (option[:-3], option[-2:], low, high))
    for option in OPTIONS
    for text, low, high in BOUNDS[option[-2:]]
]


def exactly(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), **EXACT)


def lists(b: Ragged) -> tuple[list[list[float]], list[list[float]], list[list[bool]]]:
    """Trained, rollout, mask; the log-ratios of row 2 are 45, -45 and 2."""
    return b.log_prob.tolist(), b.old_log_prob.tolist(), b.mask.tolist()


def as_floats(metrics: dict[str, Ratio | float]) -> dict[str, float]:
    out = {}
    for name, value in metrics.items():
        if isinstance(value, tuple):
            numerator, denominator = float(value[0]), float(value[1])
            value = numerator / denominator if denominator else 0.0
        out[name.removeprefix("rollout_corr/")] = value
    return out


@each_seed
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "low", "high"), THRESHOLDS)
@pytest.mark.parametrize("normalise", [False, True])
def test_weights(
    seed: int, level: str, threshold: float | str, low: float | None, high: float, normalise: bool
) -> None:
    b = ragged(seed)
    leaf = b.log_prob.clone().requires_grad_()
    found = rollout_weights(
        leaf, b.old_log_prob, b.mask, level=level, threshold=threshold, batch_normalize=normalise
    )
    exactly(found, reference.weights(*lists(b), level, low, high, normalise))
    assert not found.requires_grad and not found[~b.mask].any()


@each_seed
@pytest.mark.parametrize(("option", "threshold", "rule"), CASES)
def test_rejection_by_one_option(seed: int, option: str, threshold: str, rule: Rule) -> None:
    b = ragged(seed)
    # a row that is close
    b.log_prob[3] = b.old_log_prob[3] + torch.linspace(-0.1, 0.1, 6, dtype=torch.float64)
    found = rejection(b.log_prob, b.old_log_prob, b.mask, options=option, thresholds=threshold)
    assert found.tolist() == reference.keep(*lists(b), [rule])
    assert found.dtype == torch.bool and not (found & ~b.mask).any()


def test_the_cases_of_one_option_keep_some_and_reject_some() -> None:
    for option in OPTIONS:
        kept = total = 0
        for seed, (_, threshold, _) in itertools.product(
            SEEDS, [case for case in CASES if case[0] == option]
        ):
            b = ragged(seed)
            b.log_prob[3] = b.old_log_prob[3] + torch.linspace(-0.1, 0.1, 6, dtype=torch.float64)
            kept += int(
                rejection(b.log_prob, b.old_log_prob, b.mask, options=option, thresholds=threshold).sum()
            )
            total += int(b.mask.sum())
        assert 0 < kept < total, option


def test_what_stands_on_a_bound_is_inside() -> None:
    """Rows of one token with logr = 1, log 2, −log 2 and 0."""
    log2 = math.log(2.0)
    old = torch.tensor([[1.0], [log2], [-log2], [0.0]], dtype=torch.float64)
    args = old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool)
    k3 = str(float(torch.expm1(old[1]) - log2))
    for over in ("token", "seq_sum", "seq_mean", "seq_max"):
        expected = [
            ("k2", "0.5", [True] * 4),
            ("k3", k3, [False, True, True, True]),
            ("k1", "0.5_2.0", [False, True, True, True]),
        ]
        for kind, threshold, kept in expected[: 2 if over == "seq_max" else 3]:
            assert rejection(*args, options=f"{over}_{kind}", thresholds=threshold)[:, 0].tolist() == kept
    for level in ("token", "sequence"):
        for threshold, weights in (("0.9_1", [0.0, 0.0, 0.0, 1.0]), ("1_1.9", [0.0, 0.0, 0.0, 1.0])):
            assert rollout_weights(*args, level=level, threshold=threshold)[:, 0].tolist() == weights
        found = as_floats(correction_metrics(*args, level=level, threshold=1.0))
        assert (found["rollout_is_ratio_fraction_high"], found["rollout_is_ratio_fraction_low"]) == (
            0.5,
            0.25,
        )


@each_seed
@pytest.mark.parametrize("number", [2, 3])
def test_rejection_by_options_joined(seed: int, number: int) -> None:
    b, picks = ragged(seed), list(range(0, len(CASES), 2))
    for start in picks:
        cases = [CASES[(start + 7 * k) % len(CASES)] for k in range(number)]
        options, thresholds = ", ".join(case[0] for case in cases), " ,".join(case[1] for case in cases)
        found = rejection(b.log_prob, b.old_log_prob, b.mask, options=options, thresholds=thresholds)
        assert found.tolist() == reference.keep(*lists(b), [case[2] for case in cases]), options


@each_seed
def test_a_single_number_may_come_as_a_number(seed: int) -> None:
    b = ragged(seed)
    for option in ("token_k1", "seq_mean_k3"):
        by_text = rejection(b.log_prob, b.old_log_prob, b.mask, options=option, thresholds="1.25")
        assert torch.equal(
            rejection(b.log_prob, b.old_log_prob, b.mask, options=option, thresholds=1.25), by_text
        )


@each_seed
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "low", "high"), THRESHOLDS)
@pytest.mark.parametrize("corrected", [(False, False), (True, False), (False, True), (True, True)])
def test_metrics(
    seed: int,
    level: str,
    threshold: float | str,
    low: float | None,
    high: float,
    corrected: tuple[bool, bool],
) -> None:
    b = ragged(seed)
    weights = (
        rollout_weights(b.log_prob, b.old_log_prob, b.mask, level=level, threshold=threshold)
        if corrected[0]
        else None
    )
    keep = (
        rejection(b.log_prob, b.old_log_prob, b.mask, options="token_k1", thresholds="0.8_1.2")
        if corrected[1]
        else None
    )
    found = correction_metrics(
        b.log_prob, b.old_log_prob, b.mask, weights=weights, keep=keep, level=level, threshold=threshold
    )
    expected = reference.metrics(
        *lists(b),
        reference.weights(*lists(b), level, low, high, False) if corrected[0] else None,
        reference.keep(*lists(b), [("token", "k1", 0.8, 1.2)]) if corrected[1] else None,
        level,
        1 / high if low is None else low,
        high,
    )
    assert as_floats(found) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_nothing(level: str) -> None:
    b = ragged(0)
    found = as_floats(correction_metrics(b.log_prob, b.old_log_prob, torch.zeros_like(b.mask), level=level))
    assert found == dict.fromkeys(reference.metrics([], [], [], None, None, level, 0.5, 2.0), 0.0)


@each_seed
@pytest.mark.parametrize(("option", "threshold", "rule"), CASES)
def test_the_denominators_after_rejection_count_what_was_accepted(
    seed: int, option: str, threshold: str, rule: Rule
) -> None:
    b = ragged(seed)
    keep = rejection(b.log_prob, b.old_log_prob, b.mask, options=option, thresholds=threshold)
    accepted = reference.keep(*lists(b), [rule])
    num_tokens, num_rows = sum(map(sum, accepted)), sum(map(any, accepted))
    scale = LossScale.count(b.mask & keep)
    assert (scale.num_tokens, scale.num_sequences) == (num_tokens, num_rows)
    ones = torch.ones_like(b.log_prob)
    loss = vanilla(LossInputs(b.old_log_prob, b.old_log_prob, ones, b.mask & keep, scale)).loss
    # Σ over accepted / accepted, whatever was rejected
    assert loss.item() == pytest.approx(-1.0 if num_tokens else 0.0)


def everything(b: Ragged, level: str, normalise: bool) -> tuple[Tensor, Tensor, dict[str, float]]:
    args = b.log_prob, b.old_log_prob, b.mask
    weights = rollout_weights(*args, level=level, threshold=1.4, batch_normalize=normalise)
    keep = rejection(*args, options="seq_mean_k1,token_k3", thresholds="0.7_1.5,0.2")
    return (
        weights,
        keep,
        as_floats(correction_metrics(*args, weights=weights, keep=keep, level=level, threshold=1.4)),
    )


def changed(b: Ragged, change: dict[str, Tensor]) -> Ragged:
    return Ragged(**{**vars(b), **change})


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000), st.permutations(range(7)), st.sampled_from(["token", "sequence"]), st.booleans()
)
def test_row_order_changes_nothing(seed: int, order: list[int], level: str, normalise: bool) -> None:
    b = ragged(seed)
    weights, keep, metrics = everything(b, level, normalise)
    there = everything(changed(b, {name: x[order] for name, x in vars(b).items()}), level, normalise)
    torch.testing.assert_close(there[0], weights[order], **EXACT)
    assert torch.equal(there[1], keep[order])
    assert there[2] == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["token", "sequence"]),
    st.booleans(),
)
def test_padding_changes_nothing(
    seed: int, more: int, on_the_left: bool, level: str, normalise: bool
) -> None:
    b = ragged(seed)
    sides, kept = ((more, 0), slice(more, None)) if on_the_left else ((0, more), slice(0, -more))
    wide = {"mask": torch.nn.functional.pad(b.mask, sides, value=False)}
    wide |= {
        name: torch.nn.functional.pad(vars(b)[name], sides, value=float("nan"))
        for name in ("log_prob", "old_log_prob")
    }
    weights, keep, metrics = everything(b, level, normalise)
    there = everything(changed(b, wide), level, normalise)
    torch.testing.assert_close(there[0][:, kept], weights, **EXACT)
    assert torch.equal(there[1][:, kept], keep) and there[1].sum() == keep.sum()
    assert there[2] == pytest.approx(metrics, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(["token", "sequence"]))
def test_parts_of_a_batch_say_what_the_whole_says(seed: int, cut: int, level: str) -> None:
    """Weights and rejection are a row's own matter without normalisation; metrics with counts add up."""
    b = ragged(seed)
    whole = everything(b, level, False)
    parts = [
        changed(b, {name: x[rows] for name, x in vars(b).items()})
        for rows in (slice(0, cut), slice(cut, None))
    ]
    for k in (0, 1):
        torch.testing.assert_close(
            torch.cat([everything(part, level, False)[k] for part in parts]), whole[k], **EXACT
        )
    args = [(part.log_prob, part.old_log_prob, part.mask) for part in [*parts, b]]
    first, second, joint = (correction_metrics(*each, level=level) for each in args)
    for name, value in joint.items():
        if isinstance(value, tuple):
            one, other = first[name], second[name]
            assert isinstance(one, tuple) and isinstance(other, tuple)
            assert float(one[1] + other[1]) == float(value[1])
            assert float(one[0] + other[0]) == pytest.approx(float(value[0]), rel=1e-9, abs=1e-9), name
