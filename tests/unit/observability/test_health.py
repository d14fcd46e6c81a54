from __future__ import annotations

import math

import pytest

from hybridflow.observability.health import HealthWatch, health_warnings

GOOD = {
    "actor/entropy": 0.8,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "response_length/clip_ratio": 0.1,
    "training/rollout_log_probs_diff_max": 1e-5,
    "actor/num_skipped_steps": 0.0,
}


@pytest.mark.parametrize(
    ("rule", "change", "text"),
    [
        ("entropy", {"actor/entropy": 1e-5}, "entropy has collapsed"),
        ("rewards", {"critic/score/max": 0.0}, "all rewards of this step are 0"),
        ("truncated", {"response_length/clip_ratio": 0.51}, "51% of the responses"),
        ("log_probs", {"training/rollout_log_probs_diff_max": 0.02}, "up to 0.02 nats"),
        ("actor/num_skipped_steps", {"actor/num_skipped_steps": 2.0}, "2 optimizer step(s) of actor"),
        ("not_finite", {"actor/pg_loss": math.nan}, "actor/pg_loss"),
    ],
)
def test_each_rule_speaks_alone(rule: str, change: dict[str, float], text: str) -> None:
    found = health_warnings({**GOOD, **change})
    assert list(found) == [rule] and text in found[rule]


def test_nothing_to_say() -> None:
    assert health_warnings(GOOD) == {} and health_warnings({}) == {}


def test_a_rule_is_repeated_only_now_and_then() -> None:
    watch = HealthWatch(repeat_every=3)
    bad = {**GOOD, "actor/entropy": 0.0}
    assert [bool(watch.new_warnings(bad, step)) for step in range(5)] == [True, False, False, True, False]
