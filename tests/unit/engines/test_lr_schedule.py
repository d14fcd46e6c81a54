"""The learning rate by hand-computed numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridflow.config.model import OptimConfig
from hybridflow.engines.optimizer import learning_rate, warmup_steps


def rates(steps: int, total: int, **keys: Any) -> list[float]:
    config = OptimConfig(lr=8.0, **keys)
    return [learning_rate(step, config, total) for step in range(steps)]


def test_constant_with_and_without_warm_up() -> None:
    assert rates(3, 10) == [8.0, 8.0, 8.0]
    assert rates(6, 10, lr_warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_warm_up_as_a_share_of_all_steps() -> None:
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=0.25), 10) == 2
    assert rates(4, 8, lr_warmup_steps_ratio=0.25) == [4.0, 8.0, 8.0, 8.0]
    assert rates(2, 8, lr_warmup_steps_ratio=0.25, lr_warmup_steps=0) == [8.0, 8.0], (
        "the absolute number wins"
    )


def test_a_line_to_its_end_and_on() -> None:
    assert rates(7, 4, lr_scheduler_type="linear") == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    assert rates(6, 4, lr_scheduler_type="linear", min_lr_ratio=0.5) == [8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    assert rates(7, 6, lr_scheduler_type="linear", lr_warmup_steps=2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]


def test_a_half_cosine() -> None:
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    expected = [8.0, 8.0 * quarter, 4.0, 8.0 * (1 - quarter), 0.0, 0.0]
    assert rates(6, 4, lr_scheduler_type="cosine") == pytest.approx(expected, abs=1e-12)
    floor = [2.0 + 6.0 * rate / 8.0 for rate in expected]
    assert rates(6, 4, lr_scheduler_type="cosine", min_lr_ratio=0.25) == pytest.approx(floor, abs=1e-12)


def test_several_cycles() -> None:
    assert rates(5, 4, lr_scheduler_type="cosine", num_cycles=1.0) == pytest.approx(
        [8.0, 4.0, 0.0, 4.0, 8.0], abs=1e-12
    )
    assert rates(7, 6, lr_scheduler_type="cosine", num_cycles=1.5) == pytest.approx(
        [8.0, 4.0, 0.0, 4.0, 8.0, 4.0, 0.0], abs=1e-12
    )


def test_all_warm_up_and_no_steps_at_all() -> None:
    assert rates(3, 2, lr_scheduler_type="linear", lr_warmup_steps=2) == [4.0, 8.0, 8.0]
    assert rates(1, 0, lr_scheduler_type="cosine") == [8.0]


def test_wsd_is_stable_and_falls_at_the_end_by_megatrons_formulas() -> None:
    keys: dict[str, Any] = {"lr_scheduler_type": "wsd", "lr_warmup_steps": 2, "lr_wsd_decay_steps": 4}
    stable = [4.0] + [8.0] * 6
    shares = [0.25, 0.5, 0.75]
    curves = {
        "linear": [1 - x for x in shares],
        "cosine": [0.5 * (1 + math.cos(math.pi * x)) for x in shares],
        "exponential": [2 * 0.5**x - 1 for x in shares],
        "minus_sqrt": [1 - math.sqrt(x) for x in shares],
    }
    for style, curve in curves.items():
        got = rates(12, 10, lr_wsd_decay_style=style, **keys)
        assert got == pytest.approx([*stable, *(8 * y for y in curve), 0.0, 0.0]), style
        floor = rates(12, 10, lr_wsd_decay_style=style, min_lr_ratio=0.25, **keys)
        assert floor == pytest.approx([*stable, *(2 + 6 * y for y in curve), 2.0, 2.0]), style


def test_wsd_falls_in_the_last_tenth_unless_told_otherwise() -> None:
    got = rates(41, 40, lr_scheduler_type="wsd", lr_wsd_decay_style="linear")
    assert got == pytest.approx([8.0] * 37 + [6.0, 4.0, 2.0, 0.0])
    assert rates(3, 2, lr_scheduler_type="wsd", lr_wsd_decay_steps=0) == [8.0, 8.0, 8.0]
