from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer


def test_parts_reduce_to_what_one_pass_gives() -> None:
    parts = []
    for values in ([1.0, 4.0], [2.0, 3.0, 11.0]):
        part = Metrics()
        for value in values:
            part.add_mean("mean", value)
            part.add_sum("sum", value)
            part.add_max("max", value)
            part.add_min("min", value)
            part.add_last("last", value)
        parts.append(part)
    merged = Metrics.merge(parts)
    assert merged.to_floats() == {"mean": 21 / 5, "sum": 21.0, "max": 11.0, "min": 1.0, "last": 11.0}
    assert parts[0].to_floats()["sum"] == 5.0, "merging must leave the parts alone"


def test_mean_is_weighted_by_its_denominators() -> None:
    metrics = Metrics()
    metrics.add_mean("clip", torch.tensor(3), torch.tensor(10))
    metrics.add_mean("clip", 1.0, torch.tensor(30.0))
    assert metrics.to_floats() == {"clip": 0.1}


def test_tensors_are_copied_detached_and_mix_with_floats() -> None:
    value = torch.tensor([2.5], requires_grad=True)
    metrics = Metrics()
    metrics.add_max("max", value)
    metrics.add_max("max", 1.0)
    metrics.add_min("min", 7.0)
    metrics.add_min("min", value)
    with torch.no_grad():
        value.zero_()
    assert metrics.to_floats() == {"max": 2.5, "min": 2.5}


@pytest.mark.parametrize("nan", [math.nan, torch.tensor(math.nan)])
@pytest.mark.parametrize("kind", ["mean", "sum", "max", "min"])
def test_nan_stays_visible(kind: str, nan: float) -> None:
    for values in ([1.0, nan], [nan, 1.0]):
        metrics = Metrics()
        for value in values:
            getattr(metrics, f"add_{kind}")("x", value)
        assert math.isnan(metrics.to_floats()["x"])


def test_mean_of_nothing_is_left_out_but_a_broken_one_is_not() -> None:
    metrics = Metrics()
    metrics.add_mean("empty", 0.0, 0.0)
    metrics.add_mean("broken", math.nan, 0.0)
    assert list(metrics.to_floats()) == ["broken"]


def test_mappings_update_as_newest_values_and_order_is_kept() -> None:
    metrics = Metrics()
    metrics.add_sum("b", 1)
    metrics.update({"a": 1.0})
    metrics.update({"a": 2.0})
    assert list(metrics.to_floats().items()) == [("b", 1.0), ("a", 2.0)]


def test_sums_of_mini_batches_can_be_averaged() -> None:
    step = Metrics()
    for shares in ([0.25, 0.75], [2.0, 1.0]):
        mini = Metrics()
        for share in shares:
            mini.add_sum("actor/pg_loss", share)
        mini.average_sums(["actor/pg_loss", "not/there"])
        step.update(mini)
    assert step.to_floats() == {"actor/pg_loss": 2.0}


def test_wrong_use_is_refused() -> None:
    metrics = Metrics()
    metrics.add_sum("x", 1)
    with pytest.raises(AssertionError, match="'x' was a sum and is now added as a max"):
        metrics.add_max("x", 1)
    with pytest.raises(AssertionError, match="one number"):
        metrics.add_sum("y", torch.ones(2))


def test_timer_nests_repeats_and_survives_exceptions() -> None:
    ticks = iter(float(2**i) for i in range(20))
    timer = Timer(clock=lambda: next(ticks))
    with timer("step"), timer("gen"):  # 1, 2 … 4, 8
        pass
    with pytest.raises(KeyError), timer("gen"):  # 16 … 32
        raise KeyError("x")
    assert timer.as_metrics() == {"timing_s/gen": 18.0, "timing_s/step": 7.0}
    assert timer.seconds("gen") == 18.0 and timer.seconds("adv") == 0.0
    timer.reset()
    with timer("gen"), timer("gen"):  # 64, 128 … (closing the inner one reads no clock) 256
        pass
    assert timer.as_metrics() == {"timing_s/gen": 192.0}


def test_importing_metrics_loads_no_torch() -> None:
    code = (
        "import sys, hybridflow.observability.metrics, hybridflow.observability.timing; sys.exit('torch' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
