"""Pages of the benchmarks are written from results: they say what is met, what is missed, what is noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import cluster_parity
import grpo_step
import side_by_side as kit
import start


def test_a_ratio_of_ranges_that_overlap_is_noise() -> None:
    assert kit.ratio([4.0, 5.0, 6.0], [1.0, 2.0, 3.0], "as fast") == "2.50 × as fast"
    assert kit.ratio([2.0, 4.0], [1.0, 3.0]) == "1.50 × (within the noise)"


def test_a_machine_is_named_by_more_than_its_series() -> None:
    named = kit.machine()
    assert named.endswith("cores") and (not Path("/proc/cpuinfo").exists() or "(" in named)


def side(*seconds: float, memory: float = 10.0) -> dict[str, Any]:
    parts = dict.fromkeys(grpo_step.SHARES, 0.5)
    return {"seconds": list(seconds), "parts": parts, "memory_mib": {"peak": 2 * memory, "step": memory}}


def test_a_grpo_step_where_exact_mode_does_not_hold() -> None:
    sides = {"ours": side(1.0, 1.1), "trl": side(2.0, 2.2, memory=40.0), "trl-16": side(1.05, 3.0)}
    impossible = {"ours-exact": "rollout.exact=true cannot hold: …"}
    case = {"threads": 2, "pattern": "life", "sides": sides, "impossible": impossible}
    page = grpo_step.page_of({"cases": [case]})
    assert "| 2 | life | ours-exact | does not hold on this machine |" in page
    assert "| 2.00 × as fast, 0.25 of the memory |" in page and "as fast (within the noise)" in page
    assert "1.93 × as fast as the faster of TRL's sides, wanted 3.0: **missed**" in page
    assert "-0." not in page
    width = len(grpo_step.HEAD)
    assert all(line.count("|") == width + 1 for line in page.splitlines() if line.startswith("| 2 "))


def test_goals_of_the_start() -> None:
    sides = {"ours": {"seconds": [5.0], "cpu": [5.0]}, "trl": {"seconds": [4.0], "cpu": [4.0]}}
    page = start.page_of({"cases": [{"threads": 1, "sides": sides}]})
    assert "1.25 × TRL's time, wanted at most 1: **missed**; 5.0 s, wanted under 10: met" in page


def test_weights_of_a_step_are_judged_by_the_learning_rate() -> None:
    result = json.loads(cluster_parity.RESULT.read_text())
    assert result["problems"] == []
    (lora,) = [row for row in result["cells"] if (row["algorithm"], row["spread"]) == ("ppo", "lora")]
    assert lora["largest_move"] == pytest.approx(2e-3), (
        "two updates at the smaller learning rate, the critic's"
    )
    worse = cluster_parity.with_share({**lora, "step_weights": 5e-5})
    (problem,) = cluster_parity.missed(worse, result["steps"])
    assert problem.startswith("ppo/lora: step_weights_share 2.50e-02 > 0.02")
    assert cluster_parity.page_of(result) == cluster_parity.RESULT.with_suffix(".md").read_text()
