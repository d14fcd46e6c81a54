"""What one kind of device can do is said in one room; everything else asks the table of accelerators.

Code is looked at and not what is written about it: comments and docstrings may say CUDA.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from sources import sources

pytestmark = pytest.mark.xdist_group("sources")  # parsed once

ROOM = "distributed.cuda"
"""The facilities of CUDA, which alone may say `torch.cuda`."""
TABLE = "distributed.accelerators"
"""The table of accelerators, which names the device of each row once."""
_SHIM = "it makes a library that says CUDA alone run on a CPU"
ALLOWED: dict[str, str] = {
    "engines.megatron.on_cpu: 'cuda'": _SHIM,
    "engines.megatron.on_cpu: 'torch.cuda.'": _SHIM,
}
"""`module: what it says` of further places, with the reason."""


def _docstrings(tree: ast.Module) -> set[int]:
    """The ids of constants that stand alone as a statement, as docstrings do."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


def naming(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and code of each place that names CUDA as a kind of device."""
    documentation = _docstrings(tree)
    for node in ast.walk(tree):
        if id(node) not in documentation and isinstance(node, (ast.expr, ast.stmt)) and _names_it(node):
            yield node.lineno, ast.unparse(node)[:60]


def _names_it(node: ast.AST) -> bool:
    match node:
        case ast.Attribute():
            return node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda"
        case ast.Import():
            return any(name.name.startswith("torch.cuda") for name in node.names)
        case ast.ImportFrom(module="torch"):
            return any(name.name == "cuda" for name in node.names)
        case ast.ImportFrom(module=str(module)):
            return module.startswith("torch.cuda")
        case ast.Constant(value=str(text)):
            return text == "cuda" or text.startswith("cuda:") or "torch.cuda" in text
    return False


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.cuda.is_available()", True),
        ("torch.version.cuda", False),
        ("tensor.is_cuda", True),
        ("from torch.cuda import Stream", True),
        ("from torch import cuda", True),
        ("import torch.cuda.nvtx", True),
        ("device.type == 'cuda'", True),
        ("device = 'cuda:0'", True),
        ("f'{1}' + f'cuda:{index}'", True),
        ("probe = 'torch.cuda.is_available()'", True),
        ("'''It says torch.cuda.'''", False),
        ("raise ValueError('no CUDA device')  # torch.cuda", False),
    ],
)
def test_what_counts(code: str, found: bool) -> None:
    assert bool(list(naming(ast.parse(code)))) == found


def test_nobody_else_names_cuda_as_a_kind_of_device() -> None:
    wrong = []
    seen = set()
    for source in sources():
        if source.module == ROOM:
            continue
        for line, said in naming(source.tree):
            seen.add(f"{source.module}: {said}")
            if source.module == TABLE and said == "'cuda'":
                continue
            if f"{source.module}: {said}" not in ALLOWED:
                wrong.append(
                    f"{source.module}:{line} says {said}: ask features(device) or facilities(device)"
                )
    assert not wrong, "\n".join(wrong)
    assert set(ALLOWED) <= seen, f"no longer said: {set(ALLOWED) - seen}"


def test_the_table_names_a_kind_of_device_once() -> None:
    (table,) = (source for source in sources() if source.module == TABLE)
    # the row, and the pattern of torch's own version file
    assert [said for _, said in naming(table.tree)].count("'cuda'") == 2


def test_nobody_compares_with_the_kind_of_gpus() -> None:
    """`GPU` of the table is a value to plan with, and not one to branch on."""
    wrong = [
        f"{source.module}:{node.lineno}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare)
        for part in (node.left, *node.comparators)
        if isinstance(part, ast.Name) and part.id == "GPU"
    ]
    assert not wrong, "\n".join(wrong)
