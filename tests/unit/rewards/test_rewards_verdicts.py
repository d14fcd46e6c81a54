r"""The verdicts of the rewards of mathematics: the cases that come with them, and hostile strings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.data.answers.stated import after_answer, last_boxed, unboxed_answer
from hybridflow.data.answers.verdict import one_spelling, same_answer
from hybridflow.data.gsm8k import is_answer
from hybridflow.rewards import labelled
from hybridflow.rewards.functions import exact_match, geometry3k, gsm8k, math, math_dapo, search_r1
from hybridflow.rewards.labelled import read_cases, shipped_cases

CASES = Path(labelled.__file__).with_name("cases")
REWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "math": (math.compute_score, "So it is $\\boxed{{{}}}$."),
    "math_dapo": (math_dapo.compute_score, "So\nAnswer: {}"),
    "geometry3k": (geometry3k.compute_score, "<think>So</think>\\boxed{{{}}}"),
    "math without a box": (lambda *row: math.compute_score(*row, boxed_only=False), "The answer is {}"),
    "gsm8k": (gsm8k.compute_score, "So #### {}"),
    "gsm8k flexible": (lambda *row: gsm8k.compute_score(*row, method="flexible"), "So it is {}"),
    "search_r1": (search_r1.compute_score, "<answer>{}</answer>"),
    "exact_match normalized": (lambda *row: exact_match.compute_score(*row, normalize=True), "{}"),
}
"""Rewards, each with a response that states an answer."""
TABLE = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text(encoding="utf-8"))
ALIKE = ("math", "math_dapo", "geometry3k")
"""Rewards that judge the same answers."""


def cases_of(file: str) -> list[tuple[str, str, Any, bool]]:
    """Return class, answer, ground truth and verdict of each decided case of a file, with the answer bare."""
    found = read_cases(CASES / f"{file}.jsonl", lambda _: "{}")
    return [(case.kind, case.response, case.truth, case.right) for case in found if case.right is not None]


ANSWERS = cases_of("answers")
RESPONSES = {
    reward: [
        (text, truth, verdict == "right")
        for verdict, rows in block.items()
        for truth, *texts in rows
        for text in texts
    ]
    for reward, block in TABLE.items()
}


def is_right(reward: str, response: str, truth: Any) -> bool:
    return bool(REWARDS[reward][0]("x", response, truth)["acc"] == 1.0)


def misjudged(reward: str, dollars: bool) -> list[tuple[str, str, str, bool]]:
    return [
        case
        for case in ANSWERS
        if (case[0] == "between dollars") is dollars
        and is_right(reward, REWARDS[reward][1].format(case[1]), case[2]) is not case[3]
    ]


@pytest.mark.parametrize("reward", ALIKE)
def test_answers(reward: str) -> None:
    assert not misjudged(reward, dollars=False)


@pytest.mark.parametrize("reward", ALIKE)
def test_answers_between_dollars(reward: str) -> None:
    assert not misjudged(reward, dollars=True)


@pytest.mark.parametrize("reward", sorted(RESPONSES))
def test_responses_with_options(reward: str) -> None:
    assert not [case for case in RESPONSES[reward] if is_right(reward, *case[:2]) is not case[2]]


@pytest.mark.parametrize("reward", ["math", "math_dapo", "gsm8k", "search_r1"])
def test_responses(reward: str) -> None:
    cases = [case for case in shipped_cases(reward) if not case.place.startswith("answers")]
    wrong = [
        (case.place, case.truth, case.response)
        for case in cases
        if case.right is not None and is_right(reward, case.response, case.truth) is not case.right
    ]
    assert not wrong


def test_only_math_asks_math_verify() -> None:
    assert math_dapo.compute_score("x", "Answer: \\int_0^1 x^2 dx", "\\frac{1}{3}")["acc"] == 0.0
    assert math.compute_score("x", "\\boxed{\\int_0^1 x^2 dx}", "\\frac{1}{3}")["acc"] == 1.0


def test_the_cases_are_many_of_each_verdict() -> None:
    for name, fewest in {"math": 1400, "math_dapo": 1350, "gsm8k": 130, "search_r1": 90, "code": 50}.items():
        verdicts = [case.right for case in shipped_cases(name)]
        assert len(verdicts) >= fewest and min(verdicts.count(True), verdicts.count(False)) >= fewest / 4
        assert all(case.note for case in shipped_cases(name) if case.right is None)


HOSTILE = {
    "boxes": r"\boxed{" * 30_000,
    "closed boxes": r"\boxed{" * 20_000 + "}" * 20_000,
    "a list of boxes": r"\boxed{1}," * 20_000,
    "marks": "Answer: " * 20_000,
    "numbers": "#### 1," * 20_000,
    "groups of digits": "#### " + "11," * 50_000,
    "tags": "<answer>" * 20_000 + "</answer>" * 20_000,
    "thoughts": "<think>" + "</think>" * 20_000 + r"\boxed{" * 20_000,
    "formulas": "$" * 20_001 + "\\(" * 20_000,
    "digits": "7" * 100_000,
    "4,000 digits": "7" * 3900,
    "tower": "9^{9^{9^9}}",
    "plain tower": "9^9^9^9^9^9",
    "tower of brackets": "((((((9^9)^9)^9)^9)^9)^9)^9",
    "factorials": "((99!)!)!",
    "many factorials": "9" + "!" * 3000,
    "factorial of a tower": "(10^{10^{10}})!",
    "power of a factorial": "2^{100!}",
    "binomial": r"\binom{1000000000}{500000000}",
    "sum": r"\sum_{k=1}^{1000000000} k",
    "nested sums": r"\sum_{a=1}^{1999}\sum_{b=1}^{1999}\sum_{c=1}^{1999} abc",
    "sum of powers": r"\sum_{a=1}^{1999}\sum_{b=1}^{1999} x^{ab}",
    "10,000 fractions": r"\frac" * 10_000,
    "fractions": r"\frac" * 600 + "1" * 600,
    "nested fractions": r"\frac{1}{" * 400 + "2" + "}" * 400,
    "groups": "{" * 1900 + "1" + "}" * 1900,
    "brackets": "(" * 1900 + "1" + ")" * 1900,
    "roots": r"\sqrt" * 600 + "2",
    "large powers": "+".join(["2^{100000}"] * 300),
    "large roots": "+".join([r"\sqrt[3]{7^{39999}+1}"] * 150),
    "exponentials": "e^{e^{e^{e^{x}}}}",
    "sine of a huge number": r"\sin(10^{5000})+x",
    "tiny numbers": "x+10^{-5000}",
    "factorial near a pole": "(10^{-300}+x)!+10^{-5000}",
    "large factorial": r"(10^{50}+\pi)!",
    "huge exponent": "1e999999999",
    "list": "x," * 1900 + "1",
    "signs": r"\pm 1," * 600 + "1",
    "equations": "x=" * 1900 + "1",
    "ratio": "1:" * 1900 + "1",
    "matrix": r"\begin{pmatrix}" + "1&" * 900 + r"1\end{pmatrix}",
    "begins": r"\begin{pmatrix}" * 250,
    "empty matrix": r"\begin{cases}\end{cases}",
    "integrals": r"\int\int\int\int \sin(\cos(\tan(x y z))) dx dy dz",
    "tower in an integral": r"\int_0^1 x^{x^{x}} dx",
    "signs of powers": "^" * 3900,
    "bars": "|" * 3900,
    "units": "5" + r"\text{m}" * 400 + "^2" * 400,
    "odd characters": "\x00\ud800٣²\u200b",
    "characters for two digits": "⑳" * 3000,
    "a subscript of such": "x_{" + "⑳" * 3000 + "} = 1, x_2 = 2",
    "repeated digits": r"0.\overline{" + "3" * 3800 + "}",
}
TRUTHS = ("5.5", r"\{1, x^2+1, \pi\}")
MOST_SECONDS = 30.0
"""CPU time for one string and all truths and rewards; usually far below one."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_string_scores_nothing_and_ends(name: str) -> None:
    text = HOSTILE[name]
    began = time.process_time()
    for reward, (compute_score, form) in REWARDS.items():
        for truth in TRUTHS if reward in ("math", "math_dapo") else TRUTHS[:1]:
            for response in (text, form.format(text)):
                assert compute_score("x", response, truth)["acc"] == 0.0, (reward, truth)
    one_spelling(text)
    assert time.process_time() - began < MOST_SECONDS


PIECES = r"""
    \frac \sqrt \boxed { } ( ) [ ] \{ \} 1 2 10 0.5 x n e i \pi ^ _ + - * / = < \le \pm \in \cup , ; : \ldots
    \text{cm} \text{and} \text{(A)} \% \$ $ ! | \sin \log_2 \binom \sum_{k=1}^{n} \max \gcd \approx \infty
    ^\circ \begin{pmatrix} \end{pmatrix} \\ & \lfloor \rfloor ' million km and 10^{5000} 1e-19 \overline{3} 0.
    \mathbb{R} \emptyset ½ − ² ß ٣ \bmod \begin{cases} \end{cases} p.m. \mathrm{e} \left \right. \langle
"""


def test_no_text_raises() -> None:
    drawn = random.Random(5)
    pieces = [*PIECES.split(), " "]
    for _ in range(2000):
        texts = ["".join(drawn.choices(pieces, k=drawn.randint(1, 20))) for _ in range(2)]
        assert same_answer(*texts) in (True, False, None)
        assert isinstance(one_spelling(texts[0]), str)
        for read in (last_boxed, after_answer, unboxed_answer):
            read(texts[0])
        for method in ("strict", "flexible"):
            is_answer(f"#### {texts[0]}", texts[1], method)  # type: ignore[arg-type]


def test_every_answer_equals_itself() -> None:
    texts = {text for _, *pair, _ in ANSWERS for text in pair if text}
    ended = {text: f" {text.rstrip('.')}." for text in texts if not text.endswith("...")}
    assert not [text for text, same in ended.items() if same_answer(text, same) is not True]


def test_a_changed_digit_is_another_answer() -> None:
    """But for what is rounded, common divisors, and powers of i."""
    rounded = ("floor", "ceil", "gcd", "i^{")
    truths = {case[2] for case in ANSWERS if not any(part in case[2] for part in rounded)}
    others = [
        (truth, f"{truth[:place]}{(int(digit) + 3) % 10}{truth[place + 1 :]}")
        for truth in sorted(truths)
        for place, digit in enumerate(truth)
        if digit in "0123456789"
    ]
    assert len(others) > 1200
    assert not [pair for pair in others if same_answer(*pair)]


@pytest.mark.parametrize(
    "texts",
    [
        (r"$x = \frac12$.", "0.5", "1/2", r"\dfrac{2}{4}"),
        ("1,034", "1034", "1034.0", r"1{,}034 \text{ km}"),
        (r"\text{east}", "East", "east."),
        ("-2, 1", r"1 \text{ or } -2", r"\{1, -2\}"),
        ("(1, 2)", r"\left(1,2\right)"),
        ("2", "002"),
    ],
)
def test_equal_answers_have_one_spelling(texts: tuple[str, ...]) -> None:
    assert len({one_spelling(text) for text in texts}) == 1
