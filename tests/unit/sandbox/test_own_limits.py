"""A worker that limits itself: what a user's function allocates, forks and prints costs that worker only."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")
START = """
import os, time
from hybridflow.sandbox.own_limits import OwnLimits
limits = OwnLimits(memory_mb=MEMORY, processes=12, output_kb=4)
"""


def run(code: str, memory_mb: int = 128) -> subprocess.CompletedProcess[str]:
    program = START.replace("MEMORY", str(memory_mb)) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


def test_an_allocation_of_30_gib_raises() -> None:
    code = "try: x = bytearray(30 << 30)\nexcept MemoryError: os.write(1, b'MemoryError')"
    assert run(code).stdout == "MemoryError"


def test_a_flood_of_output_is_cut_and_allowed_again() -> None:
    code = """
for _ in range(100): os.write(1, b'x' * (1 << 16))
while limits.dropped < 100 * (1 << 16) - 4096: time.sleep(0.01)
limits.allow_output()
os.write(1, b'next')

"""
    assert run(code).stdout == "x" * 4096 + "next"


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(40):\n    if os.fork() == 0: time.sleep(600)\ntime.sleep(600)",
        "for _ in range(5):\n    if os.fork() == 0:\n        x = b'1' * (40 << 20)\n        time.sleep(600)\n"
        "time.sleep(600)",
    ],
    ids=["processes", "memory"],
)
def test_children_beyond_the_limits_end_the_worker_and_themselves(code: str) -> None:
    # the pipes are read to their end, so every process that held them has ended
    ended = run(code)
    assert ended.returncode == -9
    assert "its worker ends" in ended.stderr
