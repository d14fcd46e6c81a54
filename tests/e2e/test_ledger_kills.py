"""Runs that are killed with SIGKILL at transitions of their ledger train each group once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ledger_kills import KINDS, SCHEDULES

from ranks import Command


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_killed_at_each_kind_of_transition(schedule: str, tmp_path: Path) -> None:
    arguments = ["--schedule", schedule, "--calls", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = Command("ledger_kills", arguments, tmp_path / "log", environment=environment).wait()
    lines = done.output.splitlines()
    assert done.returncode == 0, done.output
    assert len(lines) == 2 * len(KINDS) and all(line.endswith("right") for line in lines), lines
