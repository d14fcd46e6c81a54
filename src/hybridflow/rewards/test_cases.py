"""The test cases of a program: a ground truth in, programs to run out, and what their output says.

    {"inputs": [...], "outputs": [...]}                     what is printed for each standard input
    {"inputs": [...], "outputs": [...], "fn_name": NAME}    what a function (or method of Solution) returns
    {"assert_case": [...]}, or assert statements as a text  expressions that hold

What is expected stays out of the sandbox where it is a plain value: a program could print what it knows.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import operator
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import RewardError

_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

_CALLER = """
import json, os, sys

def plain(value):
    if type(value).__module__ == "numpy":
        value = value.tolist()
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(*kind.__getnewargs__(value))
    for kind, base in ((list, list), (tuple, tuple), (set, set), (frozenset, set)):
        if isinstance(value, kind):
            return base(plain(item) for item in value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value

def main():
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    names = {"__name__": "solution"}
    exec(compile(request["code"], "solution.py", "exec"), names)
    exec(compile(request["setup"], "setup.py", "exec"), names)
    function = request["function"]
    for call in request["calls"]:
        try:
            if not function:
                value = eval(call, names)
            elif function in names:
                value = names[function](*call)
            else:
                value = getattr(names["Solution"](), function)(*call)
            line = repr(plain(value))
        except Exception as error:
            line = "!" + type(error).__name__
        out.write("\\n" + request["mark"] + json.dumps(line) + "\\n")
        out.flush()

main()
"""
"""Computes calls after a solution has run; prints each value after a mark that the solution is not given.
What equals a value of a built-in type, such as a Counter or a scalar of numpy, is printed as one.
"""


@dataclass(frozen=True)
class Program:
    """A program to run, and the function that says of each of its cases whether its output passes."""

    code: str
    stdin: str
    num_cases: int
    passed: Callable[[str], list[bool]]


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
        return [_asserts(solution, cases["assert_case"], max_cases)]
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
        Program(solution, _text(given), 1, functools.partial(_printed, _text(expected)))
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
    return _caller(solution, "", function, calls, checks)


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


def _asserts(solution: str, asserts: Sequence[Any], max_cases: int) -> Program:
    """Return a program that computes what asserts compare; other statements are run before."""
    try:
        statements = ast.parse("\n".join(str(each) for each in asserts)).body
    except SyntaxError as error:
        raise RewardError(f"the assert statements of the ground truth cannot be read: {error}") from error
    setup = [statement for statement in statements if not isinstance(statement, ast.Assert)]
    tests = [statement.test for statement in statements if isinstance(statement, ast.Assert)][:max_cases]
    if not tests:
        raise RewardError("the ground truth has no assert statement, and no inputs and outputs")
    calls = []
    checks = []
    for test in tests:
        expression, expected = _sides(test)
        calls.append(ast.unparse(expression))
        checks.append(functools.partial(operator.eq, expected))
    return _caller(solution, ast.unparse(ast.Module(setup, [])), "", calls, checks)


def _sides(test: ast.expr) -> tuple[ast.expr, Any]:
    """Return the expression to compute and its value: `f(2) == 4` gives f(2) and 4, another test itself."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        try:
            return test.left, ast.literal_eval(test.comparators[0])
        except ValueError:
            pass
    return ast.Call(ast.Name("bool"), [test], []), True


def _caller(
    solution: str,
    setup: str,
    function: str,
    calls: Sequence[Any],
    checks: Sequence[Callable[[Any], bool]],
) -> Program:
    mark = secrets.token_hex(16)

    def passed(output: str) -> list[bool]:
        lines = [line for line in output.splitlines() if line.startswith(mark)]
        found = [_value(line.removeprefix(mark)) for line in lines[: len(checks)]]
        found += [_NONE] * (len(checks) - len(found))
        return [value is not _NONE and check(value) for value, check in zip(found, checks, strict=True)]

    request = {"code": solution, "setup": setup, "function": function, "calls": calls, "mark": mark}
    return Program(_CALLER, json.dumps(request), len(checks), passed)


_NONE = object()
"""The value of a call that raised, or that returned something without a literal."""


def _value(line: str) -> Any:
    try:
        return ast.literal_eval(json.loads(line))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NONE
