"""The built-in reward functions, and how names, sources and terms lead to them."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.data.answers.stated import last_boxed
from hybridflow.data.tasks.arithmetic_chain import worked_answer
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import ScoreRequest
from hybridflow.rewards.call import call
from hybridflow.rewards.compose import resolve
from hybridflow.rewards.functions import (
    arithmetic_chain,
    exact_match,
    gsm8k,
    length,
    random,
    reasoning_gym,
    search_r1,
)
from hybridflow.rewards.functions import math as math_reward
from hybridflow.rewards.load import load_user_function
from hybridflow.rewards.result import normalize_result


def score_of(
    config: RewardConfig, response: str, truth: Any = "1", source: str = "x", **extra_info: Any
) -> tuple[float, dict[str, Any]]:
    function = resolve(config, seed=7)
    return normalize_result(
        function(data_source=source, solution_str=response, ground_truth=truth, extra_info=extra_info)
    )


@pytest.mark.parametrize(
    ("response", "truth", "options", "wanted"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris", "Paris", {"strip": False}, 0.0),
        ("paris.", "Paris", {}, 0.0),
        ("The  PARIS!", "the paris", {"normalize": True}, 1.0),
        ("Lutetia", ["Paris", "Lutetia"], {}, 1.0),
        ("Lutetia", np.array(["Paris", "Lutetia"]), {}, 1.0),
        ("7", 7, {}, 1.0),
    ],
)
def test_exact_match(response: str, truth: Any, options: dict[str, Any], wanted: float) -> None:
    assert exact_match.compute_score("x", response, truth, **options) == {"score": wanted, "acc": wanted}


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("<answer> The  Eiffel-Tower! </answer>", 1.0),
        ("<answer>Paris</answer> no: <answer>eiffeltower</answer>", 1.0),
        ("<answer>Eiffel\nTower</answer>", 1.0),
        ("<answer>Eiffel Tower</answer><answer>Paris</answer>", 0.1),
        ("Eiffel Tower", 0.0),
        ("<answer></answer>", 0.1),
    ],
)
def test_search_r1(response: str, wanted: float) -> None:
    truths = ["Eiffel-Tower", "an Eiffel  tower"]
    for truth in (truths, tuple(truths), {"target": truths}):
        found = search_r1.compute_score("x", response, truth, format_score=0.1)
        assert found == {"score": wanted, "acc": float(wanted == 1.0)}
    assert search_r1.compute_score("x", "<answer>a cat</answer>", "Cat")["score"] == 1.0


def test_gsm8k_format_score_is_for_a_wrong_number() -> None:
    assert gsm8k.compute_score("x", "#### 5", "72", format_score=0.1) == {"score": 0.1, "acc": 0.0}
    assert gsm8k.compute_score("x", "five", "72", format_score=0.1)["score"] == 0.0
    with pytest.raises(ConfigError, match="strict or flexible"):
        gsm8k.compute_score("x", "#### 5", "72", method="loose")


def test_the_score_of_math_is_its_verdict() -> None:
    for response, wanted in ((r"\boxed{7}", 1.0), (r"\boxed{8}", 0.0)):
        assert math_reward.compute_score("math", response, "7") == {"score": wanted, "acc": wanted}
        assert gsm8k.compute_score("openai/gsm8k", f"#### {response}", "7")["score"] == wanted


def test_math_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_math_verify(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("math_verify"):
            raise ImportError(name)
        return real_import(name, *rest, **more)

    math_reward._math_verify.cache_clear()
    monkeypatch.setattr(builtins, "__import__", no_math_verify)
    with pytest.raises(RewardError, match="install the extra 'math'"):
        resolve(RewardConfig(function="math"), seed=0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\boxed{1}. So \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{1}, $\boxed{2}$ or $x = \boxed{3}$", "1, 2, 3"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{1} and \boxed", None),
        (r"\boxed{a \fbox{b} c}", r"a \fbox{b} c"),
        (r"\boxed{a \fbox{b c}", "b c"),
        (r"} \fbox{3}}", "3"),
        (r"{ \boxed{} x", None),
        (r"\boxed{4}. The answer is in \boxed{ }.", "4"),
        (r"boxed{1} {2}", None),
        (r"\boxed{1}. No: \boxed{\left\{ 2 \right.}", r"\left\{ 2 \right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \\{b} c}", r"a \\{b} c"),
        (r"\boxed 7", "7"),
        (r"\boxed7.", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox 7 of them", "7"),
        (r"\boxed 1,234.", "1,234"),
        (r"\boxed\frac{1}{2} x", r"\frac{1}{2}"),
        (r"\boxed{1}. I use \boxed.", "1"),
        (r"\boxedx{1}", None),
        (r"\\boxed{3}", "3"),
        (r"\boxed{" * 200_000, None),  # looked at once, and not once for each box
    ],
)
def test_the_last_box_of_a_text(text: str, wanted: str | None) -> None:
    assert last_boxed(text) == wanted


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("3 - 2 = 1 . 1 + 2 = 3 . #### 3", 1.0),
        ("#### 3 \n", 1.0),
        ("#### 4 #### 3", 1.0),
        ("#### 3 .", 0.0),
        ("#### 33", 0.0),
        ("3", 0.0),
        ("#### " + "3" * 5_000, 0.0),
        ("#### 0003", 1.0),
    ],
)
def test_arithmetic_chain(response: str, wanted: float) -> None:
    result = arithmetic_chain.compute_score("arithmetic_chain", response, "3")
    assert (result["score"], result["acc"]) == (wanted, wanted)


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        (worked_answer([3, -2, 2]), 1.0),
        ("3 - 2 = 9 . #### 4 \n", 1.0),  # wrong, and in form
        ("#### 3", 0.0),
        ("3 - 2 = 1 . 1 + 2 = 3 .", 0.0),
        ("3 - 2 = 1 #### 1", 0.0),
        ("so 3 - 2 = 1 . #### 1", 0.0),
        ("3 - 2 = 1 . #### 1 .", 0.0),
        ("", 0.0),
    ],
)
def test_the_form_of_an_arithmetic_chain(response: str, wanted: float) -> None:
    assert arithmetic_chain.compute_score("arithmetic_chain", response, "3")["format"] == wanted


def test_length_rises_over_its_buffer() -> None:
    scores = [
        length.compute_score("x", "a" * n, None, max_chars=10, buffer_chars=4) for n in (10, 11, 14, 99)
    ]
    assert scores == [0.0, 0.25, 1.0, 1.0]
    assert length.compute_score("x", "a" * 11, None, max_chars=10) == 1.0


def test_random_depends_on_seed_index_and_text_alone() -> None:
    def draw(seed: int, index: int, text: str) -> float:
        return random.compute_score("x", text, "truth", {"index": index}, seed=seed)

    draws = [draw(1, index, text) for index in range(50) for text in "abcdefghij"]
    assert draws == [draw(1, index, text) for index in range(50) for text in "abcdefghij"]
    assert draws != [draw(2, index, text) for index in range(50) for text in "abcdefghij"]
    assert abs(sum(draws) / len(draws) - 0.5) < 0.1
    assert random.compute_score("x", "a", None, None, probability=1.0) == 1.0
    scores = {
        score_of(RewardConfig(function="random"), str(n)) == score_of(RewardConfig(function="random"), str(n))
        for n in range(9)
    }
    assert scores == {True}


def test_reasoning_gym_scores_by_the_rows_entry() -> None:
    library = pytest.importorskip("reasoning_gym")
    entry = library.create_dataset("chain_sum", size=1, seed=1)[0]
    source, info = "reasoning_gym:chain_sum", {"entry": json.dumps(entry)}
    for response in (f"<answer> {entry['answer']} </answer>", f"so #### {entry['answer']}", entry["answer"]):
        assert reasoning_gym.compute_score(source, response, None, info) == {"score": 1.0, "acc": 1.0}
    assert reasoning_gym.compute_score(source, "no idea", None, info)["acc"] == 0.0
    with pytest.raises(RewardError, match="entry"):
        reasoning_gym.compute_score(source, "1", "1", {})


@pytest.mark.parametrize(
    ("source", "response", "truth"),
    [
        ("openai/gsm8k", "#### 5", "5"),
        ("HuggingFaceH4/MATH-500", r"\boxed{5}", "5"),
        ("arithmetic_chain", "#### 5", "5"),
    ],
)
def test_auto_goes_by_data_source(source: str, response: str, truth: str) -> None:
    score, extras = score_of(RewardConfig(), response, truth, source)
    assert (score, extras["acc"]) == (1.0, 1.0)


def test_auto_refuses_an_unknown_source_and_names_the_ways_out() -> None:
    with pytest.raises(
        RewardError, match=r"'my/data'.*reward.function.*custom_reward_function.path.*data.reward_fn_key"
    ):
        score_of(RewardConfig(), "5", "5", "my/data")


def test_terms_are_summed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "polite.py").write_text(
        "async def please(data_source, solution_str, ground_truth, extra_info, bonus=1):\n    return bonus "
        "* ('please' in solution_str)\n"
    )
    terms: list[dict[str, Any]] = [
        {"name": "gsm8k"},
        {"name": "length", "weight": -0.5, "max_chars": 3},
        {"name": "format", "weight": 2, "pattern": "^please", "key": "form"},
    ]
    assert score_of(RewardConfig(terms=terms), "please #### 1") == (
        2.5,
        {"acc": 1.0, "gsm8k": 1.0, "length": 1.0, "form": 1.0},
    )

    import asyncio

    function = resolve(
        RewardConfig(terms=[*terms, {"name": f"{tmp_path}/polite.py:please", "weight": 10, "bonus": 2}]),
        seed=0,
    )
    result = asyncio.run(
        function(data_source="x", solution_str="please #### 1", ground_truth="1", extra_info={})
    )
    assert result == {"acc": 1.0, "gsm8k": 1.0, "length": 1.0, "form": 1.0, "please": 2.0, "score": 22.5}


def test_terms_get_the_tokens_and_the_messages_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "def tokens(data_source, solution_str, ground_truth, extra_info, response_ids):\n"
        "    return len(response_ids)\n"
        "def turns(data_source, solution_str, ground_truth, extra_info, messages):\n"
        "    return 10 * len(messages)\n"
    )
    terms = [{"name": f"{tmp_path}/named.py:{name}"} for name in ("tokens", "turns")]
    request = ScoreRequest("x", "a", "b", {}, (1, 2, 3), [{"role": "user", "content": "a"}])
    assert call(resolve(RewardConfig(terms=terms), seed=0), request).score == 13.0


def test_where_two_terms_return_a_column_the_earlier_ones_stands(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "def a(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1, 'acc': 0.25, 'own': 1}\n"
        "def b(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1, 'acc': 0.75, 'a': 7}\n"
    )
    first, second = ({"name": f"{tmp_path}/two.py:{name}"} for name in "ab")
    columns = {"own": 1, "a": 1.0, "b": 1.0}  # a term's own value stands before a column of that name
    assert score_of(RewardConfig(terms=[first, second]), "")[1] == {"acc": 0.25, **columns}
    assert score_of(RewardConfig(terms=[second, first]), "")[1] == {"acc": 0.75, **columns}


USER_FILE = """
def compute_reward(data_source, solution_str, ground_truth, extra_info=None, scale=1):
    return scale * float(solution_str == ground_truth)
def other(data_source, solution_str, ground_truth, extra_info=None):
    return 3
def two(first, second):
    return 1
number = 5
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER_FILE)
    return str(tmp_path / "mine.py")


def custom(path: str, name: str = "compute_score", **options: Any) -> RewardConfig:
    return RewardConfig(custom_reward_function=CustomRewardConfig(path, name, options))


def test_a_users_function_by_path_and_name(user_file: str) -> None:
    assert score_of(custom(user_file, scale=2), "1") == (2.0, {})
    assert score_of(custom(user_file, "other"), "1")[0] == 3.0
    assert score_of(custom(f"{user_file}:other"), "1")[0] == 3.0
    assert score_of(custom(f"{user_file}:other", "other"), "1")[0] == 3.0
    assert score_of(RewardConfig(function=f"{user_file}:other"), "1")[0] == 3.0


CHAINED = [
    {"name": "math", "key": "first"},
    {"name": "gsm8k", "when": "first"},
    {"name": "length", "max_chars": 9, "when": "gsm8k"},
]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda file: custom("missing.py"), "no file missing.py"),
        (lambda file: custom(file, "absent"), "no name 'absent'; it defines: compute_reward"),
        (lambda file: custom(f"{file}:other", "two"), "give the name once"),
        (lambda file: custom(file, "two"), r"got two\(first, second\)"),
        (lambda file: custom(file, "other", scale=2), "scale"),
        (lambda file: custom(file, "number"), "wanted a function"),
        (lambda file: custom(file, solution_str="a"), "comes from the row"),
        (lambda file: RewardConfig(function="gsm9k"), "got 'gsm9k'"),
        (lambda file: RewardConfig(function="format"), "format needs pattern"),
        (lambda file: RewardConfig(function="gsm8k", terms=[{"name": "math"}]), "each choose the reward"),
        (lambda file: RewardConfig(terms=["gsm8k"]), "wanted {name"),  # type: ignore[list-item]
        (lambda file: RewardConfig(terms=[{"name": "gsm8k", "weight": "much"}]), "wanted a number"),
        (
            lambda file: RewardConfig(terms=[{"name": "length", "max_char": 3}]),
            "no option max_char; it has: max_chars",
        ),
        (lambda file: RewardConfig(terms=[{"name": "gsm8k"}, {"name": "gsm8k"}]), "its own `key`"),
        (lambda file: RewardConfig(terms=CHAINED), "length has when=gsm8k, which has a condition itself"),
        (lambda file: RewardConfig(terms=[{"name": "nothing"}]), r"reward.terms\[0\]: got 'nothing'"),
    ],
)
def test_a_wrong_choice_is_refused_when_it_is_loaded(config: Any, message: str, user_file: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(user_file), seed=0)


@pytest.mark.parametrize(
    "result", [1, 1.0, True, np.float32(1), np.int64(1), np.array([1.0]), {"score": np.bool_(True)}]
)
def test_results_that_are_scores(result: Any) -> None:
    assert normalize_result(result) == (1.0, {})
    assert normalize_result(3.4028234e38)[0] == 3.4028234e38, "the largest of float32"


def test_extra_values_become_plain() -> None:
    _, extras = normalize_result({"score": 0, "a": np.int64(3), "b": np.array([1, 2]), "c": {"d": (1, None)}})
    assert extras == {"a": 3, "b": [1, 2], "c": {"d": [1, None]}} and type(extras["a"]) is int


BEYOND = r"wanted a finite number.*\(in float32, at most 3.403e\+38\)"


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "None"),
        ("1.0", "'1.0'"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (np.float32("nan"), "nan"),
        *(
            (result, BEYOND)
            for result in (1e300, -1e300, 3.5e38, np.float64(1e39), 10**400, {"score": 1e300})
        ),
        ({"acc": 1.0}, r"without \"score\" \(keys: \['acc'\]\)"),
        ({"score": None}, 'as "score" None'),
        ([1.0], "list"),
        (np.array([1.0, 2.0]), "ndarray"),
        (1j, "complex"),
    ],
)
def test_results_that_are_none_say_so(result: Any, got: str) -> None:
    with pytest.raises(RewardError, match=got) as refusal:
        normalize_result(result)
    assert "wanted a finite number" in str(refusal.value)


@pytest.mark.parametrize("more", ["", ", **others"])
def test_a_function_may_name_the_response_twice(more: str, tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    head = f"def compute_score(solution_str, response=None{more}):"
    file.write_text(f"{head}\n    return solution_str + response\n")
    function = load_user_function(str(file), "compute_score", {}, key="reward")
    assert function(data_source="", solution_str="a", ground_truth="", extra_info={}) == "aa"
