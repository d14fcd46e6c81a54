"""A class name stands once in the whole source, the name of a test file once in all tests."""

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


def test_a_test_file_has_a_name_of_its_own() -> None:
    # pytest imports a test file by its bare name: a second file of that name ends whatever run collects both,
    # and which runs do depends on how tests are dealt out
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name not in ("conftest.py", "__init__.py"):
            places[path.name].append(str(path.relative_to(ROOT)))
    more = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not more, f"file names that stand more than once: {more}"
