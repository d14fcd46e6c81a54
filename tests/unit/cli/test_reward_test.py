"""`hybridflow reward-test`: what it feeds, what it shows of prompts and failures, and what it imports."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.models.tiny import create_tiny_model

CPU_SECONDS = 8.0
"""Seconds of CPU that trying a reward may take; it takes about 1.5 on a quiet machine, and 16 with torch."""

FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        return None
    raise KeyError(f"{solution_str} of row {extra_info['index']}")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return create_tiny_model(folder, hidden=32, intermediate=64, heads=2, kv_heads=1)


@pytest.fixture
def words(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    rows = [
        {
            "data_source": "arithmetic_chain",
            "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
            "reward_model": {"ground_truth": str(number + 1)},
            "answers": f"#### {number}",
        }
        for number in range(5)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "response.txt").write_text("so #### 3")
    (tmp_path / "failing.py").write_text(FAILING)
    return [
        "reward-test",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        f"actor_rollout_ref.model.path={model}",
        "reward.num_workers=0",
        "data.max_response_length=8",
    ]


@pytest.mark.parametrize(
    ("response", "fed", "scores"),
    [
        ("ground_truth", "the ground truth of each row, written as #### ANSWER", [1, 1, 1, 1, 1]),
        ("empty", "the empty text", [0, 0, 0, 0, 0]),
        ("answers", "the column answers of the data", [0, 0, 0, 0, 0]),
        ("response.txt", "the text of the file response.txt", [0, 0, 1, 0, 0]),
        ("I say #### 5", "the text 'I say #### 5', for every row", [0, 0, 0, 0, 1]),
    ],
)
def test_it_says_what_it_feeds_and_shows_the_prompt(
    words: list[str], response: str, fed: str, scores: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--response", response]) == 0
    shown = capsys.readouterr().out
    assert f"Fed as the response: {fed}" in shown and "5 of 5 rows scored" in shown
    for number, score in enumerate(scores):
        (line,) = [line for line in shown.splitlines() if f"user: {number} + 1 = ?" in line]
        assert f"{score} acc={score}" in line


def test_the_model_answers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "-n", "2", "--response", "generate"]) == 0
    shown = capsys.readouterr().out
    assert "Fed as the response: what" in shown and "2 of 2 rows scored" in shown
    assert "user: 0 + 1 = ?" in shown


def test_failures_of_one_kind_are_shown_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "reward.custom_reward_function.path=failing.py"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("Traceback") == 1 and shown.count("raise KeyError(") == 1
    assert "KeyError in 4 of 5 rows (row 0, 1, 2, 4); the first:" in shown and "of row 0" in shown
    assert "RewardError in 1 of 5 rows (row 3); the first:" in shown and "returned None" in shown
    assert "0 of 5 rows scored, 5 failed" in shown


def test_a_reward_of_conversations_finds_turns_and_messages(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talk.py").write_text(
        "def compute_score(extra_info, solution_str, **row):\n"
        "    asked, answered = extra_info['messages']\n"
        "    return extra_info['num_turns'] * (answered == {'role': 'assistant', 'content': solution_str})\n"
    )
    agents = [
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "reward.custom_reward_function.path=talk.py",
    ]
    assert main([*words, *agents]) == 0
    assert "5 of 5 rows scored\n" in capsys.readouterr().out


@pytest.mark.parametrize("truth", ["Ada", ["Ada", "Lovelace"], {"target": ["Ada"]}])
def test_one_of_several_right_answers_is_fed(
    words: list[str], truth: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"data_source": "searchR1_nq", "prompt": "Who?", "reward_model": {"ground_truth": truth}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert main([*words, "reward.function=search_r1"]) == 0
    assert "<answer>Ada</answer>" in capsys.readouterr().out


def test_test_cases_are_no_response(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "reward.function=code"]) != 0
    assert "the ground truth of code is its test cases" in capsys.readouterr().err


def test_rows_without_a_ground_truth_ask_for_a_response(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward may need none, as TRL's functions: then `None` is no right response that could be fed."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "2 + 2 = ", "solution": "4"}))
    (tmp_path / "right.py").write_text(
        "def right(completions, solution): return [float(s in c) for c, s in zip(completions, solution)]"
    )
    words = [*words, "reward.custom_reward_function.path=right.py:right"]
    assert main(words) == 1 and "(--response COLUMN)" in capsys.readouterr().err
    assert main([*words, "--response", "solution"]) == 0 and "1 of 1 rows scored" in capsys.readouterr().out


def test_a_ground_truth_that_scores_nothing_is_remarked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "reward.function=math"]) == 0
    assert "score 0 though" not in capsys.readouterr().out
    assert main([*words, "reward.terms=[{name: format, pattern: '<think>'}]"]) == 0
    assert "5 score 0 though their response is the ground truth" in capsys.readouterr().out


def test_rows_that_cannot_be_used_are_passed_over_or_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": 3}\n')
    assert main([*words, "-n", "9"]) == 0
    assert "5 of 5 rows scored" in capsys.readouterr().out
    assert main([*words, "data.prompt_key=question"]) == 1
    assert "has no column question; its columns: data_source, prompt" in capsys.readouterr().err


def test_only_answers_of_the_model_need_a_model(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    without = [word for word in words if not word.startswith("actor_rollout_ref.model.path")]
    assert main(without) == 0 and "5 of 5 rows scored" in capsys.readouterr().out
    assert main([*without, "--response", "generate"]) == 1
    assert "actor_rollout_ref.model.path is not set" in capsys.readouterr().err


def test_without_generation_it_needs_no_torch(words: list[str]) -> None:
    code = (
        "import sys; from hybridflow.cli.main import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was loaded'; sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run(
        [sys.executable, "-c", code, *words, "reward.num_workers=2"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert run.returncode == 0, run.stderr
    assert "5 of 5 rows scored" in run.stdout and after - before < CPU_SECONDS


def test_rows_of_another_layout_are_named_with_the_remedy(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2 = ?", "answer": "4"}\n')
    assert main(words) == 1
    shown = capsys.readouterr()
    said = " ".join((shown.out + shown.err).split())
    assert "train.jsonl has no column prompt; its columns: question, answer; set data.prompt_key" in said
    assert "extra_info" not in said
    assert main([*words, "data.prompt_key=question", "reward.function=gsm8k"]) == 0
    assert "set data.wrap_prompts=true" in " ".join(capsys.readouterr().err.split())
    wrapped = [*words, "data.prompt_key=question", "data.wrap_prompts=true", "reward.function=gsm8k"]
    assert main(wrapped) == 0
    shown = capsys.readouterr()
    assert "1 of 1 rows scored" in shown.out and "wrap_prompts" not in shown.err


def test_labelled_cases_give_a_table_the_wrong_verdicts_and_a_status(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        {"truth": "72", "answer": "72", "right": True, "class": "whole numbers"},
        {"truth": "72", "answer": "73", "right": False, "class": "whole numbers"},
        {
            "truth": "72",
            "response": "it is 72",
            "right": True,
            "class": "no mark",
            "note": "a reader takes it",
        },
        {"truth": "72", "answer": "72 1/2 or so", "right": None},
    ]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    judged = [*words, "reward.function=gsm8k", "--cases", "cases.jsonl"]
    assert main(judged) == 1
    shown = capsys.readouterr().out
    assert "reward.function=gsm8k on 3 cases (1 more are not decided)" in shown
    (line,) = [line for line in shown.splitlines() if "no mark" in line and "│" in line]
    assert "100.0 % (20.7–100.0)" in line
    assert "cases.jsonl:3 (no mark): wanted right, got refused; a reader takes it" in shown
    assert main([*judged, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    report = found["cases"]["cases.jsonl"]
    assert found["status"] == 1 and report["undecided"] == 1 and report["all"]["right_taken"] == 1
    assert report["classes"]["whole numbers"]["wrong_refused"] == 1
    assert [one["note"] for one in report["misjudged"]] == ["a reader takes it"]


def test_shipped_cases_judge_their_own_reward_or_the_configured_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--cases", "search_r1"]) == 0
    shown = capsys.readouterr().out
    assert "reward.function=search_r1 on" in shown and "wanted right" not in shown
    assert main([*words, "--cases", "gsm8k", "reward.function=exact_match"]) == 1
    shown = capsys.readouterr().out
    assert "reward.function=exact_match on" in shown and "more, which --json lists" in shown


def test_bad_cases_have_a_status_of_their_own(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cases.jsonl").write_text('\n{"truth": "1"}\n')
    assert main([*words, "--cases", "cases.jsonl"]) == 2
    assert "cases.jsonl:2: wanted one of answer (a bare one) and response" in capsys.readouterr().err
    assert main([*words, "--cases", "nowhere.jsonl"]) == 2
    assert "shipped, or one of math, math_dapo" in capsys.readouterr().err
    assert main([*words, "--json"]) == 2
    assert "--json is for labelled cases" in capsys.readouterr().err


def test_samples_of_a_run_are_suggested_as_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    row = {"response": "#### 1,000", "ground_truth": "1000", "score": 0.0, "data_source": "gsm8k"}
    (folder / "3.jsonl").write_text(json.dumps(row))
    assert main(["reward-test", "--suggest", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["right"] is None and json.loads(line)["class"] == "the truth but for the form"
    assert main(["reward-test", "--suggest", str(tmp_path / "nothing")]) == 2
    assert "has no samples with a score" in capsys.readouterr().err
