"""Every path of a run on a CUDA device, in float32: the CPU's numbers, up to the rounding of its kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from device_paths import *  # noqa: F403
from device_paths import Device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("cuda", rounding=1e-3, repeats=False)
