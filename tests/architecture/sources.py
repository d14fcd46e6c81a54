"""The package as parsed source: what the architecture tests look at."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hybridflow"


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands and what it names."""

    module: str
    """Importing module, dotted, without the package's name."""
    target: str
    """Imported module, dotted."""
    line: int
    in_function: bool
    type_checking: bool


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    module: str
    tree: ast.Module
    num_lines: int

    @property
    def room(self) -> str:
        """First part of the module's name: `engines`, `config`, or the file itself at the top (`errors`)."""
        return self.module.split(".")[0]


@cache
def sources() -> tuple[Source, ...]:
    """All Python files of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found.append(Source(path, module, ast.parse(text), text.count("\n")))
    return tuple(found)


@cache
def imports() -> tuple[Import, ...]:
    """All import statements of the package."""
    return tuple(found for source in sources() for found in _imports(source))


def _imports(source: Source) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool, type_checking: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(
                    Import(source.module, alias.name, child.lineno, in_function, type_checking)
                    for alias in child.names
                )
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{source.path}:{child.lineno}: relative import"
                for alias in child.names:
                    target = _module_of(child.module or "", alias.name)
                    found.append(Import(source.module, target, child.lineno, in_function, type_checking))
            inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            guarded = type_checking or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            visit(child, inside, guarded)

    visit(source.tree, False, False)
    return found


def _module_of(package: str, name: str) -> str:
    """`from package import name`: the submodule where `name` is one, else the package."""
    inside = ROOT / "src" / Path(*package.split("."), name)
    is_module = package.startswith("hybridflow") and (
        inside.with_suffix(".py").exists() or (inside / "__init__.py").exists()
    )
    return f"{package}.{name}" if is_module else package
