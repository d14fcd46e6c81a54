"""For all tests: what a command set up for its process is undone after the test that ran it; processes that
are ranks of a group; generated cases have no deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from ranks import Ranks

settings.register_profile("no deadline", deadline=None)  # no test fails by the clock
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a command inside the test's process did to logging: its handler and its levels."""
    root = logging.getLogger()
    own = logging.getLogger("hybridflow")
    handlers = list(root.handlers)
    levels = (root.level, own.level)
    yield
    for handler in [
        handler for handler in root.handlers if handler.name == "hybridflow" and handler not in handlers
    ]:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    own.setLevel(levels[1])
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in one gloo group, started at the first call and shared by the tests of a session."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three processes in one gloo group, for what does not divide by them."""
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes in one gloo group, for slow tests."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
