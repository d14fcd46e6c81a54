"""The function on the page on rewards, and the rule for answers of mathematics, are what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards.compose import resolve
from hybridflow.rewards.functions import math, math_dapo
from hybridflow.rewards.result import normalize_result

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


@pytest.mark.parametrize(
    ("response", "truth", "wanted"),
    [
        ("The answer is 15.", "15", 1.0),
        ("14", "4", 0.0),
        ("4", "4", 1.0),
        ("First 3, then 1,234.", "1234", 1.0),
        ("It is -2.50", "-2.5", 1.0),
        ("I do not know.", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_the_function_on_the_page(response: str, truth: str, wanted: float, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# my_rewards\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(code)
    config = RewardConfig(custom_reward_function=CustomRewardConfig(str(tmp_path / "my_rewards.py")))
    row: dict[str, Any] = {"data_source": "mine", "extra_info": {}}
    score, extras = normalize_result(
        resolve(config, seed=0)(solution_str=response, ground_truth=truth, **row)
    )
    assert score == wanted
    assert extras == {"acc": bool(wanted), "length": len(response)}


def table_of_answers() -> list[tuple[str, list[str], list[str]]]:
    """Return the ground truth, the right and the wrong answers of each row of the page's table."""
    section = PAGE.read_text().split("## Answers of mathematics")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        (truth.strip("| `"), re.findall("`([^`]+)`", right), re.findall("`([^`]+)`", wrong))
        for truth, right, wrong, _ in rows
    ]


@pytest.mark.parametrize(("truth", "right", "wrong"), table_of_answers())
def test_the_table_of_answers(truth: str, right: list[str], wrong: list[str]) -> None:
    for answer in [truth, *right, *wrong]:
        boxed = math.compute_score("math", f"\\boxed{{{answer}}}", truth)["acc"]
        stated = math_dapo.compute_score("math_dapo", f"Answer: {answer}", truth)["acc"]
        assert boxed == stated == float(answer not in wrong), answer
