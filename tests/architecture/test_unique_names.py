"""A class name stands once in the whole source, that of a file once in tests, benchmarks and scripts."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from sources import ROOT, sources

pytestmark = pytest.mark.xdist_group("sources")  # parsed once


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.module)
    more = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not more, f"names of more than one class: {more}; name the thing that each of them is"


def test_a_file_of_tests_or_benchmarks_has_a_name_of_its_own() -> None:
    # all are imported by their bare names: of two with one name, what ran before decides which is found
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("tests", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("conftest.py", "__init__.py"):
                places[path.name].append(str(path.relative_to(ROOT)))
    more = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not more, f"file names that stand more than once: {more}"
