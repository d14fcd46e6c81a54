"""What a step sends through the driver under Ray, counted by the benchmark that writes the page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.controller.ray.running import Traffic

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import driver_bytes

SHORT, LONG = 64, 1536
VERY_LONG = 2560
"""A mask of one group has then more bytes than columns that travel as they are."""


@pytest.fixture
def slopes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], dict[str, float]]:
    """Give the bytes a token by call of a step of GRPO, up to a length and with so many collectors."""

    def measured(long: int, collectors: int) -> dict[str, float]:
        monkeypatch.setattr(Traffic, "add", Traffic.add)  # which the benchmark replaces
        driver_bytes.count_calls(monkeypatch.setattr)
        found = {}
        for length in (SHORT, long):
            (tmp_path / str(length)).mkdir()
            found[length] = driver_bytes.measure("grpo", length, tmp_path / str(length), collectors)
        tokens = driver_bytes.ROWS * (long - SHORT)
        return {name: (found[long][name] - found[SHORT][name]) / tokens for name in found[long]}

    return measured


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_token_passes_the_driver_once(slopes: Callable[[int, int], dict[str, float]]) -> None:
    """Ids and log-probs of the rollout come in and go out; nothing else of GRPO grows with the length."""
    found = slopes(LONG, 0)
    for way in ("from rollout.collect", "to the row store"):
        assert 4.0 < found.pop(way) < 5.7, "4 bytes of a log-prob, and one of an id in a small vocabulary"
    assert {name: slope for name, slope in found.items() if slope > 0.25} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_with_a_collector_no_token_passes_the_driver(slopes: Callable[[int, int], dict[str, float]]) -> None:
    found = slopes(VERY_LONG, 1)
    assert "from collector.collect" in found and "to the row store" not in found
    assert {name: slope for name, slope in found.items() if slope > 0.25} == {}
