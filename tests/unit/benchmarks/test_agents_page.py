"""The agents page: bars by the results of cells, with nothing run."""

from __future__ import annotations

from typing import Any

import agents_page
from agents_settings import CONTROL, TASKS


def validation(value: float) -> dict[str, float]:
    agent = agents_page.AGENT
    return {
        "val-core/calculator/reward/mean@1": value,
        "val-core/search/reward/mean@1": value,
        f"{agent}/environment/num_guesses": 6 - 3 * value,
        f"{agent}/tools/tool_calls": value,
    }


def cell(name: str, before: float, after: float) -> dict[str, Any]:
    warm = {"cpu": 100.0, "steps": [60, 100], "curve": [validation(before), validation(before)]}
    curve = [{"step": 0, **validation(before)}, {"step": 5, "loss": 1.0}, {"step": 10, **validation(after)}]
    return {"name": name, "seed": 0, "cpu": 90.0, "warm_up": warm, "curve": curve, "after": validation(after)}


def test_what_is_learned_meets_the_bars_and_the_control_must_not() -> None:
    found = {name: [cell(name, 0.2, 0.2 if name == CONTROL else 0.9)] for name in TASKS}
    assert agents_page.problems_of(found, [0]) == []
    text = agents_page.page(found, "facts", [])
    assert "| calculator | accuracy | 0.20 | **0.90** (0.90) | 0.20 | 100 warm-up + 90 GRPO |" in text
    assert "| guess | mean number of guesses | 5.40 | **3.30** (3.30) | 5.40 |" in text
    assert "All bars are met." in text


def test_bars_that_are_missed_are_named() -> None:
    found = {name: [cell(name, 0.4, 0.9 if name == CONTROL else 0.5)] for name in TASKS}
    told = agents_page.problems_of(found, [0, 1])
    assert "guess: 1 of 2 seeds are there" in told
    assert "calculator: accuracy changed by +0.10, wanted +0.40" in told
    assert "guess: mean number of guesses changed by -0.30, wanted -0.80" in told
    assert any("0.40 before the run, wanted 0.3 at most" in each for each in told)
    assert any(each.startswith("calculator_random, seed 0") for each in told)
