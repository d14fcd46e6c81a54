"""A class name stands once in the whole source."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from sources import sources

pytestmark = pytest.mark.xdist_group("sources")  # parsed once


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.module)
    more = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not more, f"names of more than one class: {more}; name the thing that each of them is"
