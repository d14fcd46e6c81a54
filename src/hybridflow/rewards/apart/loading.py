"""A solution is loaded: its text in, its names out."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any


def load(code: str, imports: list[str]) -> dict[str, Any]:
    """Run a solution and return its names; what the tests import is added where it has no such name."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    names = module.__dict__
    exec(compile(code, "solution.py", "exec", dont_inherit=True), names)
    imported: dict[str, Any] = {}
    for statement in imports:
        with contextlib.suppress(Exception):
            exec(statement, imported)
    for name, value in imported.items():
        names.setdefault(name, value)
    return names
