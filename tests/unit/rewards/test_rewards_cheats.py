"""Wrong programs win nothing from the reward `code`, and right ones all: tables in `programs/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from program_tables import programs_in

from hybridflow.config.reward import RewardConfig, SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards.apart.decoding import ERRORS, PLAIN, read
from hybridflow.rewards.apart.programs import Program, together
from hybridflow.rewards.functions.code import compute_score
from hybridflow.rewards.run_programs import build_runner
from hybridflow.sandbox.sandbox import Sandbox
from hybridflow.sandbox.verdict import Verdict

pytestmark = pytest.mark.xdist_group("sandbox")
CHEATS = programs_in("cheats")
RIGHT = programs_in("right")
WRONG = programs_in("wrong")
SANDBOX = SandboxConfig(timeout=60, cpu_time=60)
"""Generous in time, so that no test fails by the clock."""
Score = Callable[[tuple[str, str]], float]


def score_by(runner: Any) -> Score:
    def score(case: tuple[str, str]) -> float:
        program, truth = case
        found = compute_score("code", f"```python\n{program}\n```", truth, runner=runner)
        return float(found["score"])

    return score


@pytest.fixture(scope="module")
def score() -> Score:
    runner = build_runner(RewardConfig(timeout=300, sandbox=SANDBOX))
    try:
        runner.prepare()
    except ConfigError as error:
        pytest.skip(f"no sandbox here: {error}")
    return score_by(runner)


class _Service:
    """Runs programs as a service does, each by a fresh interpreter, but within a sandbox."""

    START = "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, '-I', 'code.py']).returncode)"

    def __init__(self) -> None:
        self.sandbox = Sandbox(SANDBOX)

    def prepare(self) -> None:
        self.sandbox.layers()

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        found = []
        for program in programs:
            code = together() if program.tests else program.code
            found.append(self.sandbox.run(self.START, stdin=program.stdin, files={"code.py": code}))
        return found


@pytest.fixture(scope="module")
def score_of_service(score: Score) -> Iterator[Score]:
    service = _Service()
    yield score_by(service)
    service.sandbox.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN NaN",
        "9" * 5000,
        "[" * 100_000,
        '{"set": ' * 50_000,
        "[" * 300 + "]" * 300,
        '{"set": [[]]}',
        '{"dict": [[1, 2, 3]]}',
        '{"int": "0x"}',
        '{"int": [1]}',
        '{"nothing": 1}',
        '{"int": "1", "set": []}',
        '{"bytes": "0"}',
        # a set of these would compare each with each
        json.dumps({"set": [number * sys.hash_info.modulus for number in range(1000)]}),
        json.dumps({"dict": [[number * sys.hash_info.modulus, 0] for number in range(1000)]}),
        # and so would one of which half do
        json.dumps({"set": [*range(1, 1002), *(number * sys.hash_info.modulus for number in range(1000))]}),
    ],
    ids=lambda text: text[:20],
)
def test_data_that_stalls_or_is_none_is_refused(text: str) -> None:
    with pytest.raises(ERRORS):
        read(text, PLAIN)


def test_there_are_at_least_40_cheats() -> None:
    assert len(CHEATS) >= 40


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_wins_nothing(score: Score, name: str) -> None:
    assert score(CHEATS[name]) == 0.0


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_wins_all(score: Score, name: str) -> None:
    assert score(RIGHT[name]) == 1.0


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_wins_nothing(score: Score, name: str) -> None:
    assert score(WRONG[name]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_wins_nothing_from_a_service(score_of_service: Score, name: str) -> None:
    assert score_of_service(CHEATS[name]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_wins_all_from_a_service(score_of_service: Score, name: str) -> None:
    assert score_of_service(RIGHT[name]) == 1.0
