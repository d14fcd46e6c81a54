"""The function on the page on rewards does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards.resolve import resolve
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
