"""A run killed with SIGKILL at any moment and started again gives the bits of an undisturbed one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kill_resume import MOMENTS

from ranks import Command


def kill_and_resume(log: Path, *arguments: str) -> list[str]:
    """Lines of the script, which forks its runs from a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = Command("kill_resume", arguments, log, environment=environment).wait()
    assert done.returncode == 0, done.output
    return done.output.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "agents", "ahead"])
def test_killed_at_every_moment_and_at_random(algorithm: str, tmp_path: Path) -> None:
    lines = kill_and_resume(tmp_path / "log", "--algorithm", algorithm, "--random", "10")
    assert len(lines) == len(MOMENTS) + 1 and all(" equal: " in line for line in lines), lines
