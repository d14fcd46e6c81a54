"""The task of one-line functions: right answers pass their test cases, and splits share no question."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridflow.data.tasks.one_liners import OneLiners
from hybridflow.errors import ConfigError


def solves(row: dict[str, Any]) -> bool:
    names: dict[str, Any] = {}
    exec(row["messages"][1]["content"], names)
    cases = json.loads(row["reward_model"]["ground_truth"])
    pairs = zip(cases["inputs"], cases["outputs"], strict=True)
    return all(names["f"](*given) == wanted for given, wanted in pairs)


def test_right_answers_pass_and_the_others_are_as_many_as_asked_for() -> None:
    rows = OneLiners(seed=1).rows("train", 200)
    assert all(map(solves, rows))
    held_out = OneLiners(seed=2).rows("validation", 200)
    texts = [{row["prompt"][0]["content"] for row in split} for split in (rows, held_out)]
    assert not texts[0] & texts[1] and any("(x" in row["messages"][1]["content"] for row in rows)
    some = OneLiners(seed=1, right=0.4).rows("train", 200)
    assert 0.3 < sum(map(solves, some)) / 200 < 0.6
    assert OneLiners(seed=1).rows("train", 3) == rows[:3]


def test_the_control_has_the_cases_of_other_questions_in_training_only() -> None:
    control = OneLiners(shuffled=True)
    assert sum(map(solves, control.rows("train", 100))) < 10
    assert all(map(solves, control.rows("validation", 20)))
    with pytest.raises(ConfigError, match="right=2"):
        OneLiners(right=2)
