"""Imports of many modules without garbage collections, which take a fifth of their time and find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Put garbage collections off until the imports of this context are done.

    A collection goes through all objects that are alive, which are more with every module that is imported.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
