"""Runs of agents under Ray whose engines, trainers and collectors are killed within episodes: the next
attempt goes on with each episode, and makes no call twice.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import episode_losses
import pytest
from episode_kills import IGNORED, Trial
from kill_resume import differences
from ray_runs import OF_EACH_PROCESS, OWN_POOL, under_ray
from test_schedules import OF_ITS_OWN
from tiny_run import Inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("ray")]

OF_RAY = (*IGNORED, *OF_EACH_PROCESS, "reward/")
COLLECTOR = (*OWN_POOL, "trainer.num_collectors=1")
CASES = {
    "exact_async": ([(40, "generate"), (140, "train"), (330, "generate")], OWN_POOL),
    "sync": ([(40, "generate"), (140, "train"), (240, "collectors")], COLLECTOR),
}
"""By schedules: the processes that are lost, each when so many of the run's 576 calls have been made; and
what the run has. In the second one a collector plays the episodes.
"""


@pytest.mark.parametrize("schedule", CASES)
def test_episodes_go_on_when_processes_of_their_run_are_killed(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    plan, layout = CASES[schedule]
    trial = Trial(inputs, tmp_path / "runs", schedule)
    out = tmp_path / "run"
    log = trial.prepare(out)
    overrides = trial.arguments(
        out,
        *layout,
        "trainer.controller=ray",
        f"trainer.max_restarts={len(plan)}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path='{episode_losses.__file__}'",
    )
    done = under_ray(log, [json.dumps(plan), *overrides], module="episode_losses").wait()
    assert done.returncode == 0, done.output[-3000:]
    killed = re.findall(r"^killed (\w+) \d+$", done.output, re.MULTILINE)
    assert killed == [pool for _, pool in plan], done.output[-3000:]
    assert done.output.count("the workers are built anew") == len(plan), done.output[-3000:]
    assert trial.wrong_calls(out) == [] and trial.survived(out)["continued"] > 0
    assert not differences(out, trial.reference, OF_RAY, last_files_without=OF_ITS_OWN)
