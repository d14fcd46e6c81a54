"""Labelled cases: how they are read, counted and judged, and which samples of a run are suggested as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig, SandboxConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.labelled import (
    Case,
    Counts,
    JudgedCase,
    as_data,
    judge,
    own_cases,
    plain_form,
    shipped_cases,
    suggestions,
    wilson,
)

RIGHT = {"truth": "4", "answer": "4", "right": True}


def written(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("count", "total", "interval"),
    [(0, 10, (0.0, 0.2775)), (1, 10, (0.0179, 0.4042)), (5, 10, (0.2366, 0.7634)), (0, 0, (0.0, 1.0))],
)
def test_intervals_are_those_of_the_table(count: int, total: int, interval: tuple[float, float]) -> None:
    assert wilson(count, total) == pytest.approx(interval, abs=1e-4)


def test_verdicts_are_counted_by_what_they_should_be() -> None:
    def one(right: bool, taken: bool, error: str = "") -> JudgedCase:
        return JudgedCase(Case("", "", right, "all", "", "", ""), taken, 0.0, error)

    verdicts = [one(True, True)] * 4 + [one(True, False)] * 3 + [one(False, True)] * 2 + [one(False, False)]
    verdicts.append(one(True, False, "KeyError: 'x'"))
    counts = Counts.of(verdicts)
    assert counts == Counts(4, 3, 2, 1, 1)
    assert counts.rates() == {"right_refused": (3, 7), "wrong_taken": (2, 3)}
    data = as_data(verdicts)
    assert data["all"]["rate_wrong_taken"]["rate"] == 2 / 3 and len(data["misjudged"]) == 6


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"truth": "1", ', "no JSON: "),
        (r'{"truth": "\frac{1}{2}", "answer": "x", "right": true}', "a control character where LaTeX has"),
        (r'{"truth": "\sqrt{2}", "answer": "x", "right": true}', "no JSON: Invalid \\escape"),
        ("[1]", "got list, wanted an object with truth, answer"),
        ({"truth": "1", "answer": "1", "correct": True}, "unknown field correct"),
        ({"answer": "1", "right": True}, "no truth"),
        ({"truth": "1", "right": True}, "wanted one of answer (a bare one) and response"),
        ({**RIGHT, "response": "4"}, "wanted one of answer (a bare one) and response"),
        ({"truth": "1", "answer": "1"}, "got right=None"),
        ({**RIGHT, "right": "yes"}, "got right='yes', wanted true, false, or null"),
        ({**RIGHT, "class": 3}, "got class=3, wanted a text"),
        ({**RIGHT, "right": False}, "the same pair as cases.jsonl:1, with another verdict"),
        (RIGHT, "the same pair as cases.jsonl:1"),
    ],
)
def test_a_line_that_is_no_case_is_named(line: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "cases.jsonl", RIGHT, "", line)
    with pytest.raises(DataError) as caught:
        own_cases(path, RewardConfig(function="math_dapo"))
    message = str(caught.value)
    assert "not every line is a case" in message and f"cases.jsonl:3: {said}" in message


def test_many_bad_lines_and_bad_files(tmp_path: Path) -> None:
    config = RewardConfig(function="math_dapo")
    with pytest.raises(DataError, match="and 3 more lines"):
        own_cases(written(tmp_path / "bad.jsonl", *["{"] * 8), config)
    with pytest.raises(DataError, match="the file has no case"):
        own_cases(written(tmp_path / "empty.jsonl"), config)
    with pytest.raises(DataError, match="wanted a file of JSON lines in UTF-8, shipped, or one of math"):
        own_cases(tmp_path / "none.jsonl", config)
    (tmp_path / "latin.jsonl").write_bytes(b'{"truth": "\xe9"}')
    with pytest.raises(DataError, match="cannot be read"):
        own_cases(tmp_path / "latin.jsonl", config)


def test_auto_needs_the_source_of_a_case(tmp_path: Path) -> None:
    path = written(tmp_path / "cases.jsonl", {**RIGHT, "data_source": "gsm8k"}, RIGHT)
    with pytest.raises(DataError, match=r"cases.jsonl:2: the case has no data_source"):
        own_cases(path, RewardConfig())
    path = written(tmp_path / "cases.jsonl", {**RIGHT, "data_source": "gsm8k"})
    assert [case.response for case in own_cases(path, RewardConfig())] == ["#### 4"]


def test_a_reward_of_ones_own_is_judged_by_acc_or_score(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    if solution_str == 'raise':\n"
        "        raise KeyError('no')\n"
        "    if solution_str == 'dict':\n"
        "        return {'score': 5.0, 'acc': 0}\n"
        "    return 1.0 if ground_truth in solution_str else -1.0\n"
    )
    cases = [
        {"truth": "4", "response": text, "right": right}
        for text, right in [("4", True), ("14", False), ("5", False), ("dict", False), ("raise", True)]
    ]
    cases.append({"truth": "4", "response": "four", "right": None, "note": "as you like"})
    config = RewardConfig(custom_reward_function=CustomRewardConfig(str(tmp_path / "mine.py")), num_workers=0)
    with build_reward_manager(config, 0) as manager:
        verdicts = judge(manager, own_cases(written(tmp_path / "cases.jsonl", *cases), config))
    assert [one.taken for one in verdicts] == [True, True, False, False, False]
    assert [one.agrees for one in verdicts] == [True, False, True, True, False]
    assert "KeyError" in verdicts[-1].error


def test_programs_get_their_verdicts() -> None:
    config = RewardConfig(function="code", timeout=60.0, sandbox=SandboxConfig(timeout=5.0), num_workers=0)
    try:
        manager = build_reward_manager(config, 0)
    except ConfigError as error:
        pytest.skip(f"no sandbox here: {error}")
    with manager:
        verdicts = judge(manager, shipped_cases("code"))
    assert not [(one.case.place, one.error or one.taken) for one in verdicts if not one.agrees]


@pytest.mark.parametrize(
    "texts",
    [
        ("1/2", r"\frac{1}{2}", r"\dfrac12", " 1 / 2.", r"$\frac{1}{2}$"),
        ("1234", "1,234", "$1234", r"1{,}234", "1234 km", r"1234\text{ cm}^2"),
        ("east", "East", r"\text{East}.", "**east**"),
        ("50", r"50\%", "50%"),
    ],
)
def test_plain_forms(texts: tuple[str, ...]) -> None:
    assert len({plain_form(text) for text in texts}) == 1
    assert plain_form("x+1") != plain_form("x-1") and plain_form("-5") != plain_form("5")


def sample(response: str, truth: Any, score: float, **more: Any) -> dict[str, Any]:
    return {"response": response, "ground_truth": truth, "score": score, "data_source": "math", **more}


def test_samples_whose_verdicts_do_not_agree_are_suggested(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "samples"
    folder.mkdir(parents=True)
    rows = [
        sample("\\boxed{7}", "7", 1.0),
        sample("so \\boxed{7}<|im_end|>", "7", 0.0),  # an equal answer with another verdict
        sample("\\boxed{8}", "7", 0.0),
        sample("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        sample("\\boxed{1/2}", "0.5", 0.0),  # another form
        sample("<answer>12,000</answer>", "12000", -1.0),  # the truth but for the form
        sample("#### 3 eggs", "3", 1.0, acc=0.0),  # acc says that it was refused
        sample("\\boxed{9}", "7", 0.0),
        sample("\\boxed{10}", None, 0.0),
        {"response": "\\boxed{7}", "ground_truth": "7"},
    ]
    written(folder / "1.jsonl", *rows[:5])
    written(folder / "2.jsonl", *rows[5:])
    written(folder / "metrics.jsonl", "{torn")
    found = suggestions(tmp_path / "run")
    kinds = [(case["class"], case["truth"], case["response"]) for case in found]
    assert kinds == [
        ("equal answers", "7", "\\boxed{7}"),
        ("equal answers", "7", "so \\boxed{7}"),
        ("equal but for the form", "0.5", "\\boxed{\\frac{1}{2}}"),
        ("equal but for the form", "0.5", "\\boxed{1/2}"),
        ("the truth but for the form", "12000", "<answer>12,000</answer>"),
        ("the truth but for the form", "3", "#### 3 eggs"),
    ]
    assert all(case["right"] is None for case in found)
    assert "took \\frac{1}{2} and refused 1/2" in found[2]["note"]
    path = written(tmp_path / "cases.jsonl", *found)
    assert [case.right for case in own_cases(path, RewardConfig(function="math"))] == [None] * 6


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no samples with a score"):
        suggestions(tmp_path)
    written(tmp_path / "1.jsonl", sample("#### 1", "1", 1.0), "{", "")
    with pytest.raises(DataError, match=r"1\.jsonl:2 is no JSON line"):
        suggestions(tmp_path)
    written(tmp_path / "1.jsonl", sample("#### 1", "1", 1.0), '{"response": "cut')
    assert suggestions(tmp_path) == [], "a run that was killed as it wrote"


def test_a_case_of_deep_json_is_one_bad_line(tmp_path: Path) -> None:
    path = written(tmp_path / "cases.jsonl", "[" * 100_000)
    with pytest.raises(DataError, match=r"cases\.jsonl:1"):
        own_cases(path, RewardConfig(function="math"))
