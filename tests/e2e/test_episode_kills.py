"""A run of agents that is killed within an episode goes on with it, and makes no call twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from episode_kills import ALL, SCHEDULES

from ranks import Command


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_killed_at_every_moment_of_an_episode(schedule: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = Command(
        "episode_kills", ["--schedule", schedule], tmp_path / "log", environment=environment
    ).wait()
    lines = done.output.splitlines()
    assert done.returncode == 0, done.output
    assert len(lines) == len(ALL) and all(line.endswith("right") for line in lines), lines
