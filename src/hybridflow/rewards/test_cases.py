"""The test cases of a program: a ground truth in, programs to run out, and what their output says.

    {"inputs": [...], "outputs": [...]}                     what is printed for each standard input
    {"inputs": [...], "outputs": [...], "fn_name": NAME}    what a function (or method of Solution) returns
    {"assert_case": [...]}, or assert statements as a text  expressions that hold

What is expected stays out of the process that runs the program, which could print what it knows.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.apart.programs import Program, program_of_calls
from hybridflow.rewards.asserts import program_of_asserts

_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def solution_of(response: str) -> str:
    """Return the program in a response: its last fenced block, of Python if there is one, else all of it."""
    text = _THOUGHTS.sub("", response)
    blocks = _FENCED.findall(text)
    python = [block for language, block in blocks if language.lower() in ("python", "python3", "py")]
    if python:
        return str(python[-1])
    if blocks:
        return str(blocks[-1][1])
    return text


def programs_of(solution: str, ground_truth: Any, max_cases: int) -> list[Program]:
    """Return the programs that try a solution on the first cases. Raises RewardError for no test cases."""
    cases = _read(ground_truth)
    if "assert_case" in cases:
        return [program_of_asserts(solution, cases["assert_case"], max_cases)]
    inputs = list(cases.get("inputs") or ())[:max_cases]
    outputs = list(cases.get("outputs") or ())[:max_cases]
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(
            f"the test cases have {len(inputs)} inputs and {len(outputs)} outputs; wanted as many of each, "
            "at least one, or assert statements"
        )
    if cases.get("fn_name"):
        return [_calls(solution, str(cases["fn_name"]), inputs, outputs)]
    return [
        Program(solution, _text(given), 1, functools.partial(_printed, _text(expected)), must_end_well=True)
        for given, expected in zip(inputs, outputs, strict=True)
    ]


def _read(ground_truth: Any) -> Mapping[str, Any]:
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            ground_truth = [ground_truth]
    if isinstance(ground_truth, Sequence):
        ground_truth = {"assert_case": ground_truth}
    if not isinstance(ground_truth, Mapping):
        raise RewardError(
            f"got test cases of type {type(ground_truth).__name__}, wanted an object with inputs and outputs "
            "(or its JSON), or assert statements"
        )
    return {name: value for name, value in ground_truth.items() if value is not None}


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(str(line) for line in value)
    return str(value)


def _printed(expected: str, output: str) -> list[bool]:
    return [same_text(expected, output)]


def same_text(expected: str, output: str) -> bool:
    """Return whether an output has the expected words; fractions may differ by 1e-6 of their value."""
    given = output.split()
    wanted = expected.split()
    return len(given) == len(wanted) and all(map(_same_word, given, wanted))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if not any(sign in wanted for sign in ".eE"):
        return False
    try:
        return math.isclose(float(given), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _calls(solution: str, function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Program:
    """Return a program that calls a function; texts are JSON, those of inputs with an argument a line."""
    calls = []
    for given in inputs:
        if isinstance(given, str):
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        calls.append(list(given))
    checks = []
    for wanted in outputs:
        if isinstance(wanted, str):
            wanted = json.loads(wanted)
        checks.append(functools.partial(_returned, wanted))
    return program_of_calls(solution, calls, checks, function=function)


def _returned(wanted: Any, value: Any) -> bool:
    """Return whether a value is the wanted one, which may stand in a list, and has lists for tuples."""
    value = _as_json(value)
    return bool(value == wanted or (isinstance(wanted, list) and len(wanted) == 1 and value == wanted[0]))


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value
