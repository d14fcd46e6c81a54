"""Thousands of responses scored by a slow asynchronous function while they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import ScoreRequest
from hybridflow.rewards.build import build_reward_manager

SLOW = """
import asyncio, os
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    while not os.path.exists(extra_info["gate"]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.002)
    if int(solution_str) % 20 == 7:
        raise ConnectionError("the judge is away")
    return {"score": int(solution_str) / 2, "acc": 1}
"""


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_lost_and_nobody_waits_for_a_slow_reward(count: int, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    gate = tmp_path / "gate"
    config = RewardConfig(
        custom_reward_function=CustomRewardConfig(str(tmp_path / "slow.py")),
        num_workers=2,
        timeout=600.0,
        on_error="drop",
    )
    order = [(number * 7919) % count for number in range(count)]  # they end in another order than theirs
    with build_reward_manager(config, seed=0) as manager, manager.open() as session:
        for place in order:
            session.add(place, ScoreRequest("x", str(place), None, {"gate": str(gate)}))
        # no response can be scored before the last one has come, so no `add` has waited for a score
        gate.touch()
        batch = session.result()
    failing = [place % 20 == 7 for place in range(count)]
    assert [bool(kind) for kind in batch.dropped] == failing
    assert batch.scores == [0.0 if failing[place] else place / 2 for place in range(count)]
    assert batch.metrics["reward/num_errors"] == count / 20
    assert batch.metrics["reward/num_errors/ConnectionError"] == count / 20
    assert batch.metrics["reward/num_timeouts"] == 0.0
