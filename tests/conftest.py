"""For all tests: what a command set up for its process is undone after the test that ran it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run inside the test's process add a handler, whose stream pytest closes, and set levels."""
    root, own = logging.getLogger(), logging.getLogger("hybridflow")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    for handler in [handler for handler in root.handlers if handler.name == "hybridflow" and handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    own.setLevel(levels[1])
    logging.captureWarnings(False)
