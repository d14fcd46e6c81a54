"""Pickles of the user's objects, whose classes may come from a file that `data/plugin.py` has loaded.

Such a class is written as its file and its name, so a process that has not loaded the file can read it. What
owns something that ends with it (an object with `__del__`, a temporary folder) does not pickle: the copy that
a process has no more use for would take it away from the others.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import weakref
from operator import attrgetter
from types import FunctionType
from typing import Any

from hybridflow.data.plugin import PLUGIN, load_module

MAX_BYTES = 1 << 26
"""Longest pickle: the driver holds the state of each of thousands of objects."""


def dumps(value: Any) -> bytes:
    """Pickle a value; whatever its own code raises comes out, and PicklingError where it is too large."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    if written.tell() > MAX_BYTES:
        raise pickle.PicklingError(
            f"a {type(value).__name__} of {written.tell()} bytes: at most {MAX_BYTES} go between processes"
        )
    return written.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if hasattr(type(value), "__del__") or isinstance(value, weakref.finalize):
            raise pickle.PicklingError(f"a {type(value).__name__} ends something when it is deleted")
        if isinstance(value, type | FunctionType) and str(value.__module__).startswith(PLUGIN):
            module = sys.modules[value.__module__]
            with contextlib.suppress(AttributeError):  # of a class inside a function
                if attrgetter(value.__qualname__)(module) is value:
                    return _find, (module.__name__, module.__file__, value.__qualname__)
        return NotImplemented


def _find(module: str, file: str, name: str) -> Any:
    """Return a class or function of a user's file, which is loaded where it is not yet."""
    return attrgetter(name)(sys.modules.get(module) or load_module(file, key="a class of the user's"))
