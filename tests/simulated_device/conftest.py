"""Tests on the simulated accelerator, which a process has for good: they run in processes of their own, with
SIMULATED_DEVICE=gpu or npu and its folder `plugin` on PYTHONPATH (`make test-device`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from ranks import Ranks

sys.path.append(str(Path(__file__).parents[1] / "unit" / "engines"))  # its models and rows

if "SIMULATED_DEVICE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    """Begin to count anew; a fault that nobody expects fails the test, wherever its error went."""
    from simulated_accelerator import counts, timeline

    timeline.wait_for_all()
    counts.forget()
    yield
    assert not counts.faults, "\n".join(counts.faults)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes in one group of the device, shared by the tests of a session."""
    found = Ranks(2, "sim")
    yield found
    found.stop()
