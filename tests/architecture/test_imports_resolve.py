"""What tests, benchmarks, examples and scripts import of the library is there, though no suite may run it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import PACKAGE

pytestmark = pytest.mark.xdist_group("sources")  # parsed once
ROOT = PACKAGE.parents[1]


@cache
def names_of(module: str) -> frozenset[str] | None:
    """The names that a module of ours has, with modules of its folder; None: there is no such module."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    names = {each.stem for each in path.glob("*") if each.suffix == ".py" or each.is_dir()}
    path = path / "__init__.py" if (path / "__init__.py").is_file() else path.with_suffix(".py")
    if not path.is_file():
        return None
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Constant(value=str()):  # rooms that load a name when it is asked for list it
                names.add(node.value)
    return frozenset(names)


def imported_from(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of each import from the library, also of those in texts of programs."""
    text = path.read_text(encoding="utf-8")
    trees = [ast.parse(text)]
    for node in ast.walk(trees[0]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from hybridflow" in node.value:
            try:
                trees.append(ast.parse(node.value))
            except SyntaxError:  # prose
                continue
    for tree in trees:
        handled = {
            each
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for inner in [*node.body, *node.handlers]
            for each in ast.walk(inner)
        }  # a program for several versions says so by a try
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node in handled:
                continue
            if node.module and node.module.split(".")[0] == "hybridflow":
                yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def test_every_import_of_the_library_is_there() -> None:
    wrong = []
    for folder in ("tests", "benchmarks", "examples", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for line, module, name in imported_from(path):
                found = names_of(module)
                if found is None or name not in found | {"*"}:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name} of {module}")
    assert not wrong, "\n".join(wrong)
