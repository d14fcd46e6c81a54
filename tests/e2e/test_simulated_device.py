"""The tests on the simulated accelerator, in processes of their own, which have that device for good.

They are forked from one that has imported torch and the package, which costs more than most tests; what is
not slow shares a few of them.

`make test-device` runs all of them, for both kinds: one that has what CUDA has, one that has none of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ranks import Command

FOLDER = Path(__file__).parents[1] / "simulated_device"
NOTHING_SELECTED = 5
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
SHARED = (
    ("test_device.py", "test_transfers.py", "test_device_saving.py", "test_generation.py", "test_memory.py"),
    ("test_collectives.py", "test_device_push.py", "test_ranks.py", "test_device_offload.py"),
)
"""Files that share a process: those of one process, and those of several ranks."""
ALONE = tuple((file,) for file in FILES if not any(file in files for files in SHARED))


@pytest.mark.parametrize("files", [*SHARED, *ALONE], ids=lambda files: files[0])
def test_what_is_quick(files: tuple[str, ...], tmp_path: Path) -> None:
    """Each file has tests that are not slow."""
    for file in files:
        assert (FOLDER / file).is_file()
    run("gpu", "not slow", files, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("kind", "which"), [("gpu", "slow"), ("npu", "slow or not slow")])
def test_on_the_simulated_device(kind: str, which: str, file: str, tmp_path: Path) -> None:
    run(kind, which, (file,), tmp_path / "log")


def run(kind: str, which: str, files: tuple[str, ...], log: Path) -> None:
    environment = os.environ | {
        "SIMULATED_DEVICE": kind,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER / "plugin"), os.environ.get("PYTHONPATH")])),
    }
    words = [*(str(FOLDER / file) for file in files), "-q", "-p", "no:cacheprovider", "-m", which]
    tests = Command("pytest", words, log, environment=environment)
    try:
        done = tests.wait()
    finally:
        tests.kill()
    may_be_empty = which == "slow"  # not every file has slow tests; each has others
    fine = done.returncode == 0 or (may_be_empty and done.returncode == NOTHING_SELECTED)
    assert fine, done.output[-10_000:]
