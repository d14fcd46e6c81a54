"""Programs to run in a sandbox, and the verdict of their output on each case.

Where all calls are known and each is compared with a literal, one process computes them, and this one
compares. Else the tests run in a second process, which talks to that of the solution.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hybridflow.rewards.apart.decoding import ERRORS, PLAIN, dict_of, read


@dataclass(frozen=True)
class Program:
    """A program to run, and the function that decides for each case whether the output passes."""

    code: str
    stdin: str
    num_cases: int
    passed: Callable[[str], list[bool]]
    tests: str = ""
    """Code of a second process, if there is one: it gets `stdin`, and its output is what counts."""
    must_end_well: bool = False
    """No case passes unless the program ends by itself, with exit code 0."""


class Opaque:
    """A value of a solution that is no plain data: it is equal to nothing."""

    def __init__(self, truth: Any) -> None:
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth is not False


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    **PLAIN,
    "numpy": lambda fields: fields[1],
    "namedtuple": lambda fields: tuple(fields[2]),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict"), dict_of),
    **dict.fromkeys(("Decimal", "Fraction", "date", "time", "datetime", "timedelta"), Opaque),
    **dict.fromkeys(("deque", "range", "object"), Opaque),
}


def program_of_calls(
    solution: str,
    calls: Sequence[Any],
    checks: Sequence[Callable[[Any], bool]],
    *,
    function: str = "",
    imports: Sequence[str] = (),
) -> Program:
    """Return a program that computes calls, each of whose values has its check.

    A call is an expression, or the list of arguments of `function`.
    """
    mark = secrets.token_hex(16)

    def passed(output: str) -> list[bool]:
        lines = _marked(output, mark, len(checks))
        return [_holds(check, line) for check, line in zip(checks, lines, strict=True)]

    request = {
        "code": solution,
        "imports": list(imports),
        "function": function,
        "calls": list(calls),
        "mark": mark,
    }
    return Program(text_of("encoding", "batch"), json.dumps(request), len(checks), passed)


def program_of_tests(solution: str, num_cases: int, request: Mapping[str, Any]) -> Program:
    """Return a program of two processes; the request is that of `tests.py`, but for solution and mark."""
    mark = secrets.token_hex(16)

    def passed(output: str) -> list[bool]:
        return [line == "1" for line in _marked(output, mark, num_cases)]

    stdin = json.dumps({"solution": solution, "mark": mark, **request})
    return Program(
        text_of("encoding", "solution"), stdin, num_cases, passed, tests=text_of("decoding", "tests")
    )


def _marked(output: str, mark: str, number: int) -> list[str]:
    """Return the text after the mark in the first lines that have it; "" for those that are missing."""
    lines = [line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)]
    return [*lines[:number], *[""] * (number - len(lines))]


def _holds(check: Callable[[Any], bool], line: str) -> bool:
    try:
        return bool(check(read(line, _BUILDERS)))
    except ERRORS:  # it has raised, or is no data, or cannot be compared
        return False


@functools.cache
def text_of(*names: str) -> str:
    """Return a program of some files of this folder, which runs the `main` of the last one."""
    lines = ["from __future__ import annotations"]
    for name in names:
        text = resources.files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8")
        own = ("from hybridflow.", "from __future__")
        lines += [line for line in text.splitlines() if not line.startswith(own)]
    return "\n".join([*lines, "main()", ""])


@functools.cache
def together() -> str:
    """Return the program that is the solution's process and the tests' at once (`together.py`)."""
    texts = {"solution": text_of("encoding", "solution"), "tests": text_of("decoding", "tests")}
    return text_of("together").replace("texts: dict[str, str] = {}", f"texts = {texts!r}")
