"""Functions and classes of a program, by the names under which a configuration loads them.

function of a module ──► "package.module:name"            worker processes import it
cell of a notebook, script, lambda, closure ──► "hybridflow_objects:name", an entry of a module in memory
                                                          called in this process, as it is
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any

from hybridflow.config.source_code import IN_MEMORY, in_memory, shown
from hybridflow.errors import ConfigError


class Objects:
    """The objects of a run."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def spec(self, found: Any) -> str:
        """Return "module:name" for a function, a class or a callable object."""
        name = getattr(found, "__qualname__", type(found).__name__)
        home = getattr(found, "__module__", None)
        if home is not None and _is_importable(found, home, name):
            return f"{home}:{name}"
        name = re.sub(r"\W", "_", name.rpartition(".")[2])
        while getattr(self._module, name, found) is not found:
            name += "_"  # two functions of one name
        setattr(self._module, name, found)
        return f"{IN_MEMORY}:{name}"


def require_here(specs: Sequence[str], key: str, num_workers: int) -> None:
    """Raise ConfigError where a key asks for processes, and they could not import the objects."""
    names = [shown(spec) for spec in specs if in_memory(spec)]
    if names and num_workers:
        raise ConfigError(
            f"{key}={num_workers}: {', '.join(names)} is defined in a notebook, in a script or inside a "
            f"function, and worker processes cannot import it. Leave {key} out, and it is called in this "
            "process; or move it into a file and give it as 'path/to/file.py:name'"
        )


def _is_importable(found: Any, module: str, name: str) -> bool:
    """Whether a fresh process that imports the module finds this object under its name."""
    if module == "__main__" or not getattr(sys.modules.get(module), "__file__", None):
        return False
    package = module.partition(".")[0]
    if not any(finder.find_spec(package, None) for finder in sys.meta_path):
        return False  # a file that the program has loaded by its path
    try:
        return attrgetter(name)(sys.modules[module]) is found
    except AttributeError:  # a lambda, or a function inside a function
        return False


@contextmanager
def named_objects() -> Iterator[Objects]:
    """Give names to objects that are valid inside the context."""
    module = ModuleType(IN_MEMORY, "Functions and classes of the program that called hybridflow.")
    sys.modules[IN_MEMORY] = module
    try:
        yield Objects(module)
    finally:
        del sys.modules[IN_MEMORY]
