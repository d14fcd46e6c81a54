"""A run killed with SIGKILL at any moment and started again gives, bit for bit, what one gives that was never
stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kill_resume import MOMENTS

SCRIPT = Path(__file__).parent / "kill_resume.py"


def kill_and_resume(*arguments: str) -> list[str]:
    """Lines of the script, which forks its runs from a process of its own."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=1700,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(1800)
def test_killed_in_rollout_update_and_save() -> None:
    lines = kill_and_resume("--algorithm", "ppo", "--moment", "main", "--random", "0")
    assert len(lines) == 3 and all(" equal: " in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_killed_at_every_moment_and_at_random(algorithm: str) -> None:
    lines = kill_and_resume("--algorithm", algorithm, "--random", "10")
    assert len(lines) == len(MOMENTS) + 1 and all(" equal: " in line for line in lines), lines
