"""The tests on the simulated accelerator, each file in a process of its own, which has that device for good.

`make test-device` runs all of them, for both kinds: one that has what CUDA has, one that has none of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "simulated_device"
TIMEOUT = 1100  # seconds; a loaded machine takes ten times as long as a quiet one
NOTHING_SELECTED = 5
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("gpu", "not slow"),
        pytest.param("gpu", "slow", marks=pytest.mark.slow),
        pytest.param("npu", "slow or not slow", marks=pytest.mark.slow),
    ],
)
def test_on_the_simulated_device(kind: str, which: str, file: str) -> None:
    environment = os.environ | {
        "SIMULATED_DEVICE": kind,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER / "plugin"), os.environ.get("PYTHONPATH")])),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(FOLDER / file),
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        which,
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    may_be_empty = which == "slow"  # not every file has slow tests; each has others
    assert done.returncode == 0 or (may_be_empty and done.returncode == NOTHING_SELECTED), (
        done.stdout[-8000:] + done.stderr[-2000:]
    )
