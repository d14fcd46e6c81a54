"""Runs of agents under Ray whose engines, trainers and collectors are killed within episodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from episode_losses import SCHEDULES

from ranks import Command


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_episodes_go_on_when_processes_of_their_run_are_killed(schedule: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--schedule", schedule]
    done = Command("episode_losses", arguments, tmp_path / "log", environment=environment).wait()
    assert done.returncode == 0 and done.output.endswith("right\n"), done.output
