"""The benchmark of rounded weights: its rounding is what the page says, and the copy is counted."""

from __future__ import annotations

from typing import Any

import int8_rollout as bench
import pytest
import torch


@pytest.mark.parametrize("shape", [(16, 64), (48, 32)])
def test_each_channel_is_rounded_within_half_a_step(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    numbers, scales = bench.rounded(weight)
    error = (weight.double() - numbers.double() * scales.double()[:, None]).abs().amax(1)
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) == 127
    assert (error <= scales.double() * (0.5 + 1e-4)).all()
    assert (error > scales.double() * 0.25).all(), "one scale for all channels would be finer for some"


def result(copy: float) -> dict[str, Any]:
    step = {bench.PLAIN: [2.0], **{name: [1.0] for name in bench.STEPS}}
    slow = {bench.PLAIN: [4.0], **{name: [8.0] for name in bench.STEPS}}
    cases = {"1": {"8": {"step": step}, "128": {"step": slow}}}
    return {"cases": cases, "copies": {"seconds": dict.fromkeys(bench.STEPS, copy)}}


def test_steps_between_two_numbers_of_rows_are_in_proportion() -> None:
    cases = result(0.0)["cases"]["1"]
    assert bench.step_seconds(cases, bench.PLAIN, 3) == pytest.approx(2.0 - 5 / 60)
    assert bench.step_seconds(cases, bench.PLAIN, 68) == pytest.approx(3.0)


def test_a_generation_takes_the_faster_way_and_pays_for_the_copy() -> None:
    def gain(copy: float) -> list[float]:
        line = bench.generations(result(copy)).splitlines()[2]
        return [float(cell) for cell in line.split("|")[3:-1]]

    assert gain(0.0)[0] > 1.9 and min(gain(0.0)) >= 1
    assert max(gain(1e6)) < 0.1
