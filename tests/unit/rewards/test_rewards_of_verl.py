"""Rewards of verl's data sources: DAPO's mathematics, Geometry3k, and test cases of programs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards.apart.programs import Program, together
from hybridflow.rewards.functions import geometry3k, math_dapo
from hybridflow.rewards.load import function_of
from hybridflow.rewards.test_cases import programs_of, same_text, solution_of


@pytest.mark.parametrize(
    ("response", "truth", "right", "pred"),
    [
        ("Thus\nAnswer: 34", "34", True, "34"),
        ("Answer: 3\nNo. answer : $1,034$.", "1034", True, "1034"),
        (r"Answer: $x = \frac12$", r"\frac{1}{2}", True, "1/2"),
        ("Answer: 0.50", r"\frac{1}{2}", True, "1/2"),
        (r"Answer: $-2$ or $\text{1}$", "1, -2", True, "-2, 1"),
        ("**Answer:** 34", "34", True, "34"),
        ("Answer: $$\n34\n$$", "34", True, "34"),
        (r"Answer: It is \boxed{34}.", "34", True, "34"),
        ("Answer: \U0001f600", "34", False, "\U0001f600"),
        (r"Answer: \boxed{\text{east}}", "east", True, "east"),
        ("Answer: 5 km", "5", True, "5"),
        ("the answer is 34", "34", False, ""),
        ("Answer: 3" + " " * 300, "3", False, ""),
        ("Answer: 35", "34", False, "35"),
        ("Answer: $", "", False, ""),
    ],
)
def test_math_dapo(response: str, truth: str, right: bool, pred: str) -> None:
    result = math_dapo.compute_score("math_dapo", response, truth)
    assert (result["score"], result["acc"]) == ((1.0, 1.0) if right else (-1.0, 0.0))
    assert result["pred"] == pred


def test_geometry3k_weighs_form_and_value() -> None:
    scores = [
        geometry3k.compute_score("hiyouga/geometry3k", response, "3")["score"]
        for response in (r"<think>a</think> \boxed{3}", r"\boxed{3}", r"<think></think>\boxed{4}", "3")
    ]
    assert scores == pytest.approx([1.0, 0.9, 0.1, 0.0])


def test_sources_that_come_in_several_have_their_function() -> None:
    names = ("aime2024", "numina_olympiads", "searchR1_nq", "math_dapo", "numinous", "openai/gsm8k")
    assert [function_of(name) for name in names] == [
        "math_dapo",
        "math",
        "search_r1",
        "math_dapo",
        None,
        "gsm8k",
    ]


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("Sure:\n```python\nprint(1)\n```\nand\n```python\nprint(2)\n```", "print(2)\n"),
        ("```py\nprint(1)\n```\n```text\n1\n```", "print(1)\n"),
        ("```\nprint(3)\n", "print(3)\n"),
        ("<think>```python\nprint(1)\n```</think>print(4)", "print(4)"),
    ],
)
def test_the_program_of_a_response(response: str, wanted: str) -> None:
    assert solution_of(response) == wanted


def run(program: Program) -> list[bool]:
    words = [sys.executable, "-I", "-c", together() if program.tests else program.code]
    done = subprocess.run(words, input=program.stdin, capture_output=True, text=True, timeout=600)
    return program.passed(done.stdout)


def passed(solution: str, ground_truth: Any) -> list[bool]:
    return [case for program in programs_of(solution, ground_truth, 10) for case in run(program)]


def test_cases_of_standard_input() -> None:
    cases = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "12"]}
    added = "print(sum(int(word) for line in open(0) for word in line.split()))"
    assert passed(added, json.dumps(cases)) == [True, False]
    assert same_text("0.5 a\nb", "0.50000001  a b \n") and not same_text("5", "5.0000001")
    assert not same_text("1 2", "1") and not same_text("1.5", "one")


def test_cases_of_a_function() -> None:
    cases = {"fn_name": "add", "inputs": ["1\n2", [[1], [2]], "0\n0"], "outputs": ["3", [[1, 2]], "1"]}
    assert passed("def add(a, b):\n    print('noise')\n    return a + b", cases) == [True, True, False]
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert passed(method, cases) == [True, True, False]
    pair = {"fn_name": "f", "inputs": [[1]], "outputs": [[1, [2]]]}
    assert passed("def f(a):\n    return a, (2,)", pair) == [True]
    assert passed("def f(a):\n    raise SystemExit", pair) == [False]
    assert passed("syntax error", pair) == [False]


def test_cases_of_asserts() -> None:
    asserts = [
        "import math",
        "assert f(4) == 2",
        "assert f(9) == 4",
        "assert math.isclose(f(2), 1.414, rel_tol=.1)",
    ]
    assert passed("def f(x):\n    return x ** 0.5", asserts) == [True, False, True]
    assert passed("def f(x):\n    return x ** 0.5", "\n".join(asserts)) == [True, False, True]


def test_a_solution_is_not_given_what_is_expected() -> None:
    (program,) = programs_of("def f(x):\n    return 1", ["assert f(1) == 'secret'"], 10)
    assert "secret" not in program.code + program.stdin
    # a solution that ends the process, or that prints values of its own, passes nothing
    assert run(program) == [False]
    for solution in ("import os; os._exit(0)", "print('\"True\"')", "import sys; print(sys.stdin.read())"):
        assert passed(solution, ["assert f(1) > 0", "assert f(1) == 1"]) == [False, False]


@pytest.mark.parametrize("truth", [{"inputs": [], "outputs": []}, {"inputs": ["1"]}, "x = 1", "a b", 3, []])
def test_a_row_without_test_cases_is_an_error(truth: Any) -> None:
    with pytest.raises(RewardError):
        programs_of("print(1)", truth, 10)
