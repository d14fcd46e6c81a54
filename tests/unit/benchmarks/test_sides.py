"""Benchmarks ask the processes of their sides by what a side offers."""

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
USERS = sorted(path for path in BENCHMARKS.glob("*.py") if "kit.in_turn(" in path.read_text())


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.stem)
def test_a_benchmark_asks_a_side_only_for_what_it_offers(path: Path) -> None:
    """A renamed method of a side shows here, and not after the first minutes of `make bench`."""
    import side_by_side as kit

    asked = {
        node.attr
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "kit.in_turn"
        for node in ast.walk(call)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in ("side", "process")
    }
    assert asked <= {*dir(kit.Side), "process", "first"}, f"{path.name} asks a side for {sorted(asked)}"
