"""`breakpoint()` in a reward function stops a run of one process at a prompt, as docs/debugging.md says."""

from __future__ import annotations

import os
from pathlib import Path

from tiny_run import small_run, write_inputs

from ranks import Command

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
    keys = small_run(inputs, out, "algorithm.adv_estimator=grpo", steps=1)
    typed = "p 'the truth is', ground_truth, calls\nwhere\nc\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONBREAKPOINT", None)  # Ray sets it in a process where it has run
    command = Command(
        "hybridflow.trainer.main_ppo", keys, tmp_path / "log", environment=environment, typed=typed
    )
    done = command.wait()
    assert done.returncode == 0, done.output
    assert "('the truth is', '" in done.output and "', 1)" in done.output
    assert "trainer.py" in done.output, "the stack reaches from the command to the reward"
    assert "fit()" in done.output, "the stack reaches from the command to the reward"
    assert (out / "metrics.jsonl").exists(), "after `c` the run went on"
