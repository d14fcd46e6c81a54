"""Reward functions that name `completions` get lists: the completions, the prompts, the data's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards import ScoreRequest, ScoringOutcome
from hybridflow.rewards.build import build_reward_manager

FILE = """
def right(prompts, completions, target, completion_ids, bonus=0, **kwargs):
    assert len(prompts) == len(completions) == len(target) == len(completion_ids) == len(kwargs["hard"])
    return [None if kwargs["hard"][i] else len(completions) + bonus + float(target[i] in text(completions[i]))
            for i in range(len(target))]

async def waiting(completions, target):
    return [float(text(each) == wanted) for each, wanted in zip(completions, target)]

def text(completion):
    if isinstance(completion, str):
        return completion
    assert completion[0]["role"] == "assistant"
    return completion[0]["content"]

def one(completions):
    return 1.0

def plain(response):
    return 10.0
"""
CHAT = [{"role": "user", "content": "2 + 2"}]
REQUESTS = [
    ScoreRequest("x", "is 4", "4", {"target": "4", "hard": False, "index": 0}, (5, 6), prompt=CHAT),
    ScoreRequest("x", "5", "4", {"target": "4", "hard": False, "index": 1}, (7,), prompt="2 + 2 ="),
    ScoreRequest("x", "4", "4", {"target": "4", "hard": True, "index": 2}, (8,), prompt="2 + 2 ="),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "listed.py").write_text(FILE)
    return tmp_path / "listed.py"


def outcomes(num_workers: int = 0, **keys: Any) -> list[ScoringOutcome]:
    config = RewardConfig(num_workers=num_workers, timeout=600.0, **keys)
    with build_reward_manager(config, seed=0) as manager:
        return manager.outcomes(REQUESTS)


def scores(found: list[ScoringOutcome]) -> list[float]:
    assert not [one.detail for one in found if one.error]
    return [one.score for one in found]


def custom(file: Path, name: str, **options: Any) -> CustomRewardConfig:
    return CustomRewardConfig(str(file), name=name, reward_kwargs=options)


def test_row_by_row_the_lists_have_one_entry(file: Path) -> None:
    found = outcomes(custom_reward_function=custom(file, "right", bonus=2))
    assert scores(found) == [4.0, 3.0, 0.0]
    assert scores(outcomes(custom_reward_function=custom(file, "waiting"))) == [0.0, 0.0, 1.0]


def test_the_batch_manager_gives_all_rows_at_once(file: Path) -> None:
    found = outcomes(num_workers=1, manager="batch", custom_reward_function=custom(file, "right"))
    assert scores(found) == [4.0, 3.0, 0.0]


@pytest.mark.parametrize("name", ["right", "waiting"])
def test_it_is_a_term_beside_others(file: Path, name: str) -> None:
    terms = [{"name": f"{file}:{name}", "weight": 0.5}, {"name": f"{file}:plain"}]
    wanted = {"right": [11.0, 10.5, 10.0], "waiting": [10.0, 10.0, 10.5]}[name]
    assert scores(outcomes(terms=terms)) == wanted


def test_a_column_that_there_is_not_is_named(file: Path) -> None:
    file.write_text("def right(completions, solution):\n    return [0.0]\n")
    (first, *_) = outcomes(custom_reward_function=custom(file, "right"))
    assert first.error == "RewardError"
    assert "names solution, which is no column of the data; there are completion_ids, comp" in first.detail


def test_a_number_in_place_of_a_list_is_refused(file: Path) -> None:
    (first, *_) = outcomes(custom_reward_function=custom(file, "one"))
    assert first.error == "RewardError" and "'1.0', a float; one that names completions ret" in first.detail


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("right", {"prompts": 1}, "prompts comes from the row"), ("one", {"bonus": 1}, "options do not fit")],
)
def test_wrong_options_are_refused(file: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outcomes(custom_reward_function=custom(file, name, **options))
