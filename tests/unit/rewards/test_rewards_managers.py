"""Managers, which score all responses of a step in one call."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import ScoreRequest, ScoringOutcome
from hybridflow.rewards.build import build_reward_manager

FILE = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    if "few" in solution_strs:
        return [1.0]
    if "raise" in solution_strs:
        raise ValueError("no")
    return [{"score": len(solution_strs) + bonus, "acc": text == truth} if text != "none" else None
            for text, truth in zip(solution_strs, ground_truths)]

class Ranks:
    def __init__(self, compute_score):
        self.compute_score = compute_score
    async def __call__(self, rows):
        lengths = sorted(len(row["solution_str"]) for row in rows)
        return [lengths.index(len(row["solution_str"])) + self.compute_score(**row)["acc"] for row in rows]
"""


def outcomes(tmp_path: Path, *texts: str, **keys: Any) -> list[ScoringOutcome]:
    (tmp_path / "mine.py").write_text(FILE)
    config = RewardConfig(num_workers=1, timeout=600.0, **keys)
    with build_reward_manager(config, seed=0) as manager:
        return manager.outcomes([ScoreRequest("x", text, "b") for text in texts])


def test_a_function_is_called_once_with_lists(tmp_path: Path) -> None:
    function = CustomRewardConfig(str(tmp_path / "mine.py"), reward_kwargs={"bonus": 2})
    keys = {"custom_reward_function": function, "manager": "batch"}
    scored = outcomes(tmp_path, "a", "none", "b", **keys)
    assert [one.score for one in scored] == [5.0, 0.0, 5.0]
    assert [one.error for one in scored] == ["", "RewardError", ""] and scored[2].extras == {"acc": True}
    for text, error in (("few", "RewardError"), ("raise", "ValueError")):
        assert [one.error for one in outcomes(tmp_path, text, "b", **keys)] == [error, error]


def test_a_function_with_lists_gets_the_tokens_and_the_messages_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, response_ids, messages"
        "):\n"
        "    return [len(ids) + 10 * len(turns) for ids, turns in zip(response_ids, messages)]\n"
    )
    config = RewardConfig(
        manager="batch", custom_reward_function=CustomRewardConfig(f"{tmp_path}/named.py"), num_workers=1
    )
    with build_reward_manager(config, seed=0) as manager:
        (outcome,) = manager.outcomes([ScoreRequest("x", "a", "b", {}, (1, 2, 3), [{"role": "user"}])])
    assert (outcome.error, outcome.score) == ("", 13.0)


def test_a_manager_of_ones_own_uses_the_reward_function(tmp_path: Path) -> None:
    manager = f"{tmp_path / 'mine.py'}:Ranks"
    scored = outcomes(tmp_path, "long text", "b", "mid", manager=manager, function="exact_match")
    assert [one.score for one in scored] == [2.0, 1.0, 1.0]


def test_a_manager_may_call_a_function_of_columns_with_the_four_usual_arguments(tmp_path: Path) -> None:
    (tmp_path / "columns.py").write_text(
        "def reward(prompts, completions, completion_ids, ground_truth):\n"
        "    return [float(len(completions[0][0]['content']) + len(completion_ids[0]))]\n\n"
        "class Named:\n"
        "    def __init__(self, compute_score):\n"
        "        self.compute_score = compute_score\n"
        "    def __call__(self, rows):\n"
        "        names = ('data_source', 'solution_str', 'ground_truth', 'extra_info')\n"
        "        return [self.compute_score(**{name: row[name] for name in names}) for row in rows]\n"
    )
    function = CustomRewardConfig(f"{tmp_path / 'columns.py'}:reward")
    (one,) = outcomes(
        tmp_path, "abc", manager=f"{tmp_path / 'columns.py'}:Named", custom_reward_function=function
    )
    assert (one.error, one.score) == ("", 3.0)


def test_a_row_that_does_not_pickle_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    config = RewardConfig(
        num_workers=1, timeout=600.0, manager=f"{tmp_path / 'mine.py'}:Ranks", function="exact_match"
    )
    rows = [ScoreRequest("x", "b", "b"), ScoreRequest("x", "a", "b", {"lock": threading.Lock()})]
    with build_reward_manager(config, seed=0) as manager:
        right, failed = manager.outcomes(rows)
    assert (right.error, right.score, failed.error) == ("", 1.0, "TypeError")
