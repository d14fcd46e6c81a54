"""The examples of worker groups without training (examples/worker_groups), in one process and in two."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.controller import Call, MeshInfo

EXAMPLES = Path(__file__).parents[3] / "examples" / "worker_groups"
SCORES = """\
known words: ['four', 'one', 'six']
letters: [3.0, 4.0, 3.0, 0.0, 0.0]
words: [1.0, 1.0, 1.0, 0.0, 0.0]
metrics: {'words': 2.0, 'texts': 5.0}
"""


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def under_ray(name: str, *arguments: str) -> str:
    """Return what an example prints under a Ray of its own, since this process may be in another test's."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), "ray", *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hits(rank: int, darts: int) -> int:
    draw = random.Random(f"1 {rank}")
    return sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(darts))


def test_texts_are_scored_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    example("text_scores").main("local", 1)
    assert capsys.readouterr().out == "workers: ['rank 0 of 1']\n" + SCORES


def test_a_rule_of_ones_own_splits_and_collects(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("monte_carlo")
    mesh = MeshInfo(3)
    sharded = module.SHARED.split(Call((11, 7), {"more": 1}), mesh)
    assert [call.args for call in sharded.calls] == [(4, 7), (4, 7), (3, 7)]
    assert all(call.kwargs == {"more": 1} for call in sharded.calls)
    assert module.SHARED.collect([1, 2, 3], mesh, sharded) == 6
    module.main("local", 1, darts=1000)
    assert f"thrower: {hits(0, 1000)} of 1000 darts" in capsys.readouterr().out


def test_two_roles_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    example("two_pools").main("local")
    assert capsys.readouterr().out == "processes: 1\nbefore: 3.0\nafter: 0.0\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_two_roles_on_two_pools() -> None:
    assert under_ray("two_pools") == "processes: 2\nbefore: 3.0\nafter: 0.0\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_texts_are_scored_in_two_processes() -> None:
    assert under_ray("text_scores", "2") == "workers: ['rank 0 of 2', 'rank 1 of 2']\n" + SCORES


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_rule_of_ones_own_in_two_processes() -> None:
    wanted = hits(0, 100_000) + hits(1, 100_000)
    assert f"thrower: {wanted} of 200000 darts" in under_ray("monte_carlo", "2")
