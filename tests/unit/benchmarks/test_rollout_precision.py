"""The benchmark of rounded weights in the rollout: its numbers on log-probs, and the keys of its runs."""

from __future__ import annotations

import math

import pytest
import rollout_precision as bench
import torch

from hybridflow.config import PPOConfig
from hybridflow.config.checks.rollout import precision_problems, uncorrected_precision
from hybridflow.config.load import load_config


def test_differences_of_log_probs() -> None:
    trained = torch.tensor([-1.0, -2.0, -0.5])
    same = bench.differences(trained, trained.tolist())
    assert same == {"tokens": 3, "mean": 0.0, "p99": 0.0, "kl": 0.0, "kept": 1.0}
    found = bench.differences(trained, [-1.0, -2.0, -0.5 - math.log(2.0)])
    assert found["mean"] == pytest.approx(math.log(2.0) / 3)
    assert found["kl"] == pytest.approx((2.0 - 1.0 - math.log(2.0)) / 3)
    assert found["kept"] == pytest.approx((4 / 3) ** 2 / (6 / 3))


def test_the_keys_of_the_runs_go_together() -> None:
    for name, keys in bench.RUNS.items():
        config = load_config(PPOConfig, list(keys)).config
        kind = config.actor_rollout_ref.rollout.quantization
        assert (kind or bench.WHOLE) == name.split(",")[0] and not [
            *precision_problems(config),
            *uncorrected_precision(config),
        ]


def test_each_kind_has_its_line() -> None:
    seconds = {name: [2.0, 2.0] for name in bench.KINDS} | {bench.WHOLE: [4.0, 5.0]}
    sizes = dict.fromkeys(bench.KINDS, 2**20) | {f"{name}, whole": 2**22 for name in bench.KINDS}
    slow = {name: times for name, times in seconds.items() if name != "fp8"}
    found = {
        "seconds": {str(bench.ROWS[0]): seconds, str(bench.ROWS[1]): slow},
        "bytes": sizes,
        "rounding": dict.fromkeys(bench.KINDS, 0.5),
    }
    lines = bench.speed_table(found).splitlines()
    assert "2.25 (2.00–2.50)" in lines[3] and "1 MiB" in lines[3] and "0.5 s" in lines[3]
    assert "4 MiB" in lines[2] and "–" in lines[4]
