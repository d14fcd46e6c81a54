"""`breakpoint()` in a reward function stops a run of one process at a prompt, as docs/debugging.md says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny_run import small_run, write_inputs

REWARD = """
calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls == 1:
        breakpoint()
    return float(calls % 2)
"""


def test_breakpoint_in_a_reward_function(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    inputs.reward.write_text(REWARD)
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "hybridflow.trainer.main_ppo",
        *small_run(inputs, out, "algorithm.adv_estimator=grpo", steps=1),
    ]
    typed = "p 'the truth is', ground_truth, calls\nwhere\nc\n"
    done = subprocess.run(
        command,
        input=typed,
        capture_output=True,
        text=True,
        timeout=1100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "('the truth is', '" in done.stdout and "', 1)" in done.stdout
    assert "sync.py" in done.stdout and "fit()" in done.stdout, (
        "the stack reaches from the command to the reward"
    )
    assert (out / "metrics.jsonl").exists(), "after `c` the run went on"
