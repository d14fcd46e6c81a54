"""The check against published runs: its numbers are fitted, and its page is the committed one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_check import FITTED_NAMES, RESULT, check_page, compare, fit, published, ratios, sources

from hybridflow.planner.costs import FITTED, Efficiency


def test_the_numbers_that_plans_use_are_those_of_the_fit() -> None:
    found = fit(Efficiency())
    for name in FITTED_NAMES:
        assert getattr(FITTED, name) == pytest.approx(getattr(found, name), rel=0.01)
    assert replace(found, **{name: getattr(FITTED, name) for name in FITTED_NAMES}) == FITTED


def test_only_the_agreed_rows_are_fitted() -> None:
    fitted = [run for run in published() if run.get("fitted")]
    assert {run.number for run in fitted} == {10, 11, 22, 26}
    assert all("mode" not in run.inputs for run in fitted)
    assert len(FITTED_NAMES) < len(fitted)


def test_every_published_row_is_there_with_its_bar() -> None:
    rows = published()
    assert {run.number for run in rows} == set(range(1, 27))
    on_policy = [run for run in rows if "on-policy" in run.label]
    bars = {run.number: run["bar"] for run in on_policy if run.number != 10 and not run.get("fitted")}
    assert bars == {12: 0.25, 13: 0.25, 15: 0.4}
    assert {ratio.first.number for ratio in ratios(compare(FITTED))} == set(range(2, 9))


def test_an_assumed_value_has_a_reason_and_a_source() -> None:
    for source in sources().values():
        for each in source["assumed"].values():
            assert set(each) <= {"value", "why", "inferred"} and each["why"]


def test_a_verdict_follows_from_the_error() -> None:
    for each in compare(FITTED):
        if each.verdict in ("within", "missed"):
            assert each.error is not None
            assert (abs(each.error) <= each.run["bar"]) == (each.verdict == "within")


def test_the_committed_page_is_fresh() -> None:
    assert RESULT.read_text() == check_page() + "\n", "run python benchmarks/plan_check.py"
