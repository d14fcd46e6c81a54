"""Three recipes learn on one seed, warm start included: the learn table's own command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "learn.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_recipes_learn(tmp_path: Path) -> None:
    names = ("grpo", "rloo", "dapo")
    places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    command = [sys.executable, str(SCRIPT), "--algo", ",".join(names), "--seeds", "0", "--check", *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1780)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        result = json.loads((tmp_path / "out" / "learn" / f"{name}_0.json").read_text())
        assert result["after"]["sampled"] >= result["before"]["sampled"] + 0.10, name
