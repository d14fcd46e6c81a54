"""Guard rails: 900 lines a file, 120 a function, whatever their meaning; ceilings for the whole source, which
only fall; no rooms for odds and ends.
"""

from __future__ import annotations

import ast

import pytest
from sources import PACKAGE, sources

pytestmark = pytest.mark.xdist_group("sources")  # parsed once

MAX_FILE = 900
MAX_FUNCTION = 120
MAX_MATHS_FILE = 250
MAX_ALL_LINES = 112_500  # what there is, rounded up to the next 500; goal: 66,000
MAX_ALL_FILES = 650  # rounded up to the next 10; goal: 400


def test_files_are_short() -> None:
    long = {s.module: s.num_lines for s in sources() if s.num_lines > MAX_FILE}
    assert not long, f"files over {MAX_FILE} lines: {long}"
    maths = [s for s in sources() if s.room == "algorithms" and s.module != "algorithms.catalog"]
    long = {s.module: s.num_lines for s in maths if s.num_lines > MAX_MATHS_FILE}
    assert not long, f"files of the maths over {MAX_MATHS_FILE} lines: {long}"


def test_the_source_as_a_whole_does_not_grow() -> None:
    lines = sum(source.num_lines for source in sources())
    files = len(sources())
    assert lines <= MAX_ALL_LINES, f"{lines} lines, and {MAX_ALL_LINES} are the most: what can go?"
    assert files <= MAX_ALL_FILES, f"{files} files, and {MAX_ALL_FILES} are the most: what is one thing?"


def test_functions_are_short() -> None:
    long = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION:
                    long[f"{source.module}.{node.name}"] = size
    assert not long, f"functions over {MAX_FUNCTION} lines: {long}"


def test_no_rooms_for_odds_and_ends() -> None:
    banned = {"utils", "util", "common", "helpers", "misc", "experimental"}
    found = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.stem in banned]
    assert not found, found


def test_nobody_prints_from_the_library() -> None:
    wrong = []
    for source in sources():
        if source.room in ("cli", "model_merger"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{source.module}:{node.lineno}")
    assert not wrong, f"print() outside the command line: {wrong}"
