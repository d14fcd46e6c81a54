"""Environments by name: built-in ones, a user's, and what is said about a mistake."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from hybridflow.data.tasks.base import EnvironmentTask
from hybridflow.environments import Environment
from hybridflow.environments.built_in import Guess
from hybridflow.environments.load import load_environment, open_environment
from hybridflow.errors import ConfigError

MINE = '''
class Echo:
    """It has the two methods, and is no subclass."""

    def __init__(self, times=1):
        if times < 0:
            raise ValueError("times is negative")
        self.times = times

    def reset(self, row):
        return "say something"

    def step(self, text):
        return text * self.times


class Silent:
    def reset(self, row):
        return ""


number = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_built_in_environment_is_constructed_with_its_options() -> None:
    factory = load_environment("guess", {"largest": 5})
    first, second = factory(), factory()
    assert isinstance(first, Guess) and first.largest == 5 and first is not second


def test_a_class_with_reset_and_step_gets_the_rest(mine: str) -> None:
    environment = open_environment(f"{mine}:Echo", {"times": 2})
    assert isinstance(environment, Environment)
    assert type(pickle.loads(pickle.dumps(environment))) is type(environment), "it can go to other processes"
    assert environment.step("ab") == "abab" and environment.score() is None  # type: ignore[comparison-overlap]
    environment.close()


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("gess", {}, "got 'gess', wanted one of adventure, .*guess.*, or path/to/file.py:Name"),
        ("guess", {"numbers": 3}, r"data.environment_options=\{'numbers': 3\} do not fit guess\(.*largest"),
        ("MINE:Silent", {}, "is no environment, wanted a class with the methods reset"),
        ("MINE:number", {}, "is no environment"),
        ("MINE:Missing", {}, "has no name 'Missing'; it defines: Echo, Silent"),
        ("nowhere.py:Guess", {}, "no file nowhere.py"),
    ],
)
def test_a_mistake_is_named(mine: str, spec: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(spec.replace("MINE", mine), options)


def test_what_a_constructor_raises_is_told_with_its_place(mine: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)Echo raised.*times is negative") as caught:
        open_environment(f"{mine}:Echo", {"times": -1})
    assert "mine.py" in str(caught.value)
    with pytest.raises(ConfigError, match=re.escape("guess: got largest=0")):
        open_environment("guess", {"largest": 0})


def test_rows_of_an_environment_are_seeds_that_no_other_row_has() -> None:
    task = EnvironmentTask("path/to/file.py:Guess", seed=1)
    train = task.rows("train", 50)
    assert train[:10] == task.rows("train", 10)
    rows = train + task.rows("validation", 50)
    assert len({row["extra_info"]["seed"] for row in rows}) == 100
    assert {row["data_source"] for row in rows} == {"Guess"} and rows[3]["extra_info"]["index"] == 3
    assert EnvironmentTask("guess", seed=2).rows("train", 1)[0]["extra_info"] != train[0]["extra_info"]
