"""Procedural tasks: right answers, reproducible rows, no question in both splits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hybridflow.config.data import TaskConfig
from hybridflow.data.files import Row
from hybridflow.data.json_entry import decode_entry, encode_entry
from hybridflow.data.tasks import ArithmeticChain, build_task
from hybridflow.data.tasks.arithmetic_chain import question, worked_answer
from hybridflow.data.tasks.reasoning_gym import ReasoningGymTask
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards.functions import reasoning_gym


def text_of(row: dict) -> str:
    return row["prompt"][-1]["content"]


def test_the_example_of_the_documentation() -> None:
    assert question([3, 4, -2, 5]) == "3 + 4 - 2 + 5 = ?"
    assert worked_answer([3, 4, -2, 5]) == "3 + 4 = 7 . 7 - 2 = 5 . 5 + 5 = 10 . #### 10"


@pytest.mark.parametrize(("hops", "max_number"), [(1, 20), (3, 9), (6, 3)])
def test_every_step_is_right_and_never_negative(hops: int, max_number: int) -> None:
    for row in ArithmeticChain(seed=1, hops=hops, max_number=max_number).rows("train", 300):
        expression = text_of(row).removesuffix(" = ?")
        assert re.fullmatch(r"\d+( [+-] \d+)" + f"{{{hops}}}", expression)
        assert max(int(number) for number in re.findall(r"\d+", expression)) <= max_number
        answer = row["messages"][-1]["content"]
        *steps, final = answer.split(" . ")
        assert len(steps) == hops and final == f"#### {row['reward_model']['ground_truth']}"
        for step in steps:
            assert re.fullmatch(r"\d+ [+-] \d+ = \d+", step), "a minus sign would be a negative number"
            left, right = step.split(" = ")
            assert eval(left) == int(right)  # digits and signs only, by the line above
        assert eval(expression) == int(row["reward_model"]["ground_truth"])


def test_rows_depend_on_seed_split_and_index_alone() -> None:
    task = ArithmeticChain(seed=3)
    assert task.rows("train", 50) == ArithmeticChain(seed=3).rows("train", 80)[:50]
    assert task.rows("validation", 50) == ArithmeticChain(seed=3).rows("validation", 80)[:50]
    assert [text_of(row) for row in task.rows("train", 50)] != [
        text_of(row) for row in ArithmeticChain(seed=4).rows("train", 50)
    ]
    assert [row["extra_info"] for row in task.rows("train", 2)] == [
        {"index": i, "split": "train"} for i in (0, 1)
    ]


def test_splits_share_no_question_whatever_the_seeds() -> None:
    train = {
        text_of(row) for seed in range(3) for row in ArithmeticChain(seed=seed, hops=2).rows("train", 1000)
    }
    held_out = [text_of(row) for row in ArithmeticChain(seed=1, hops=2).rows("validation", 200)]
    assert len(set(held_out)) == 200, "validation questions are all different"
    assert not train & set(held_out)


def test_too_small_a_task_says_so() -> None:
    with pytest.raises(
        DataError, match=r"has about \d+ different validation questions, 500 were asked for.*val_size"
    ):
        ArithmeticChain(hops=1, max_number=4).rows("validation", 500)


def test_build_task_by_name_and_from_a_file(tmp_path: Path) -> None:
    built = build_task(TaskConfig(name="arithmetic_chain", seed=5, options={"hops": 2}))
    assert built.rows("train", 3) == ArithmeticChain(seed=5, hops=2).rows("train", 3)
    file = tmp_path / "mine.py"
    file.write_text(
        "class Task:\n    def __init__(self, seed, word='x'): self.text = f'{word}{seed}'\n"
        "    def rows(self, split, size): return [{'prompt': self.text}] * size\n"
    )
    assert (
        build_task(TaskConfig(name=f"{file}:Task", seed=5, options={"word": "y"})).rows("train", 2)
        == [{"prompt": "y5"}] * 2
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            TaskConfig(name="arithmetic"),
            "wanted arithmetic_chain, arithmetic_preferences, one_liners, red_squares, reasoning_gym:NAME",
        ),
        (TaskConfig(name="arithmetic_chain", options={"hop": 2}), r"data\.task\.options=.*hop"),
        (TaskConfig(name="arithmetic_chain", options={"hops": 0}), "at least 1"),
        (TaskConfig(name="/no/such.py:f"), "no file /no/such.py"),
        (TaskConfig(name="builtins:dict"), "gave dict, wanted an object with rows"),
    ],
)
def test_task_mistakes(config: TaskConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_task(config)


def score(row: Row, response: str) -> float:
    return float(reasoning_gym.compute_score(row["data_source"], response, None, row["extra_info"])["score"])


def test_entries_survive_json() -> None:
    entry = {"a": (1, (2, 3)), "b": {1: "x", (0, 1): [2.5, None, True]}, "c": {3, 1}, "d": "text"}
    assert decode_entry(encode_entry(entry)) == entry


def test_reasoning_gym_rows_and_scores() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask(
        "chain_sum", seed=2, val_size=20, options={"max_terms": 3, "system_prompt": "Be brief."}
    )
    rows = task.rows("train", 30)
    assert rows == task.rows("train", 30) and len(rows) == 30
    assert rows[0]["data_source"] == "reasoning_gym:chain_sum"
    assert rows[0]["prompt"][0]["content"] == "Be brief."
    assert score(rows[0], rows[0]["reward_model"]["ground_truth"]) == 1.0
    assert score(rows[0], "no number at all") < 0.2


def test_reasoning_gym_verifier_that_compares_tuples() -> None:
    pytest.importorskip("reasoning_gym")
    (row,) = ReasoningGymTask("rearc").rows("train", 1)
    assert score(row, row["reward_model"]["ground_truth"]) == 1.0


def test_reasoning_gym_splits_share_no_question() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask(
        "chain_sum", val_size=40, options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    held_out = {text_of(row) for row in task.rows("validation", 40)}
    train = [text_of(row) for row in task.rows("train", 200)]
    assert len(train) == 200 and not held_out & set(train)


def test_reasoning_gym_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"has no task 'nonsense'; it has: .*chain_sum"):
        ReasoningGymTask("nonsense")
    with pytest.raises(ConfigError, match="no_such_option"):
        ReasoningGymTask("chain_sum", options={"no_such_option": 1}).rows("train", 1)
    with pytest.raises(ConfigError, match=r"data\.task\.seed"):
        ReasoningGymTask("chain_sum", options={"seed": 1})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="install the extra 'tasks'"):
        ReasoningGymTask("chain_sum")
