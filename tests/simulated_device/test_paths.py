"""Every path of a run on the simulated device: the CPU's numbers, up to the rounding of its attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import simulated_accelerator  # noqa: F401  (registers the device)

sys.path.insert(0, str(Path(__file__).parents[1]))

from device_paths import *  # noqa: F403
from device_paths import Device


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("sim", rounding=2e-5, repeats=True)
