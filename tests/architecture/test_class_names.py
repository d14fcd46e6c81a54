"""A class name stands once in the whole source; the list of exceptions only shrinks."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from sources import sources

pytestmark = pytest.mark.xdist_group("sources")  # parsed once

REPEATED: dict[str, int] = {
    "Answer": 2,
    "Call": 4,
    "Choice": 2,
    "Cluster": 2,
    "Difference": 2,
    "Endpoint": 2,
    "Facts": 2,
    "Field": 2,
    "Handler": 2,
    "Held": 2,
    "Job": 3,
    "Layer": 2,
    "Limit": 2,
    "Limits": 2,
    "Metrics": 2,
    "Outcome": 2,
    "Part": 2,
    "Phase": 2,
    "Piece": 4,
    "Row": 2,
    "Rows": 3,
    "Rule": 2,
    "Run": 3,
    "Runner": 3,
    "Sampled": 2,
    "Scored": 2,
    "Search": 2,
    "Segment": 2,
    "Server": 3,
    "Source": 4,
    "Span": 2,
    "Tool": 2,
    "Unreadable": 2,
    "_Pickler": 3,
    "_Row": 3,
    "_Spread": 2,
    "_Worker": 2,
}
"""Names of more than one class, and of how many. None is added: a new class gets a name of its own."""


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.module)
    more = {name: modules for name, modules in places.items() if len(modules) > REPEATED.get(name, 1)}
    assert not more, f"names that other classes have already: {more}; name the thing that the new class is"
    fewer = {name: len(places[name]) for name, count in REPEATED.items() if len(places[name]) < count}
    assert not fewer, f"these repeat less often now: {fewer}; lower them in REPEATED, or take them out"
