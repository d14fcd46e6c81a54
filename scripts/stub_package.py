"""The whole of a package that is only imported: any module and any name of it exists, and whatever is called
raises.

scripts/setup_sglang.sh copies it as sgl_kernel (SGLang's CUDA kernels) and torchvision, of which there is no
CPU build that fits.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import ClassVar
from unittest.mock import MagicMock

PACKAGE = __name__


class Module(types.ModuleType):
    """Has every name that is asked for."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        missing = f"{self.__name__}.{name} is a stub: there is no such kernel in this environment"
        return MagicMock(name=f"{self.__name__}.{name}", side_effect=RuntimeError(missing))


class Finder:
    """Finds every module of the package."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, Finder(), is_package=True)
            if name.startswith(f"{PACKAGE}.")
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Module:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if PACKAGE != "__main__":
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    sys.modules[PACKAGE].__class__ = Module
