"""A reward function that takes what the machine has costs its own row, and the run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import ScoreRequest
from hybridflow.rewards.build import build_reward_manager

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a worker's own are Linux's")

GREEDY = """
import os, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "allocates":
        return len(bytearray(30 << 30))
    if solution_str == "prints":
        for _ in range(64):
            os.write(1, b"x" * (1 << 20))
    if solution_str == "forks":
        for _ in range(400):
            if os.fork() == 0:
                time.sleep(600)
        time.sleep(600)
    if solution_str == "exits":
        sys.exit(0)
    if solution_str == "ends":
        os._exit(0)
    if solution_str == "hangs":
        time.sleep(600)
    return 1.0
"""


def test_each_costs_its_own_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    config = RewardConfig(
        custom_reward_function=CustomRewardConfig(str(tmp_path / "greedy.py")),
        num_workers=1,
        timeout=20.0,
        memory_limit_mb=1024,
    )
    wanted = {
        "allocates": "MemoryError",
        "prints": "",
        "forks": "died",
        "exits": "SystemExit",
        "ends": "died",
        "hangs": "timeout",
    }
    with build_reward_manager(config, seed=0) as manager:
        rows = [ScoreRequest("x", text, None) for how in wanted for text in (how, "fine")]
        outcomes = manager.outcomes(rows)
    assert [outcome.error for outcome in outcomes[::2]] == list(wanted.values())
    assert [outcome.score for outcome in outcomes[1::2]] == [1.0] * len(wanted)
    assert len(capfd.readouterr().out) < 4 << 20
