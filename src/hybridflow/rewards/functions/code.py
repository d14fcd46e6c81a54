"""Code: the share of the test cases that the program in a response passes, run in a sandbox.

response ──last fenced block──► program ──sandbox, or a SandboxFusion service──► output ──► cases passed
"""

from __future__ import annotations

from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.result import required
from hybridflow.rewards.run_programs import FAILED, ProgramRunner
from hybridflow.rewards.test_cases import programs_of, solution_of


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    *,
    continuous: bool = True,
    max_cases: int = 10,
    runner: ProgramRunner | None = None,
) -> dict[str, Any]:
    """Return the share of the first `max_cases` cases that pass; if not `continuous`, 1.0 for all, else 0.0.

    `rewards/test_cases.py` has the forms of the ground truth. `acc` is 1.0 where all pass, `fenced` is 1.0
    where the response has a fenced block, and `verdict` is passed, wrong, or how the first program that did
    not end well has ended. Raises RewardError where the sandbox fails, or the row has no test cases.
    """
    assert runner is not None, "bound where the function is loaded"
    programs = programs_of(solution_of(solution_str), required(ground_truth), max_cases)
    passed: list[bool] = []
    verdict = ""
    for program, ran in zip(programs, runner.run(programs), strict=True):
        if ran.status in FAILED:
            raise RewardError(f"the sandbox failed: {ran.stderr}")
        if ran.status != "ok" and program.must_end_well:
            passed += [False] * program.num_cases
        else:  # what was computed before it was stopped counts
            passed += program.passed(ran.stdout)
        if ran.status != "ok":
            verdict = verdict or ran.status
    share = sum(passed) / len(passed)
    if not verdict:
        verdict = "passed" if share == 1.0 else "wrong"
    solved = float(share == 1.0)
    return {
        "score": share if continuous else solved,
        "acc": solved,
        "fenced": float("```" in solution_str),
        "verdict": verdict,
    }
