"""A run says what each step should have taken: the parts that it measured, corrected by its first step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config

from hybridflow.distributed.device import measured_cpu, peak_since_asked
from hybridflow.explain.trial import small_batch
from hybridflow.planner.costs import Costs, Lengths, StepRows
from hybridflow.planner.hardware import HARDWARE, Cluster
from hybridflow.planner.model_shape import read_shape
from hybridflow.planner.run_plan import RunPlan
from hybridflow.trainer.ppo.run_plan import make_predictor


def test_a_run_predicts_the_parts_that_it_measures(model: Path, tmp_path: Path) -> None:
    words = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=3"]
    with build(ppo_config(model, tmp_path / "run", *words)) as trainer:
        trainer.fit()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "perf/predicted/step" in line]
    assert len(steps) == 3
    for line in steps:
        parts = {name.rpartition("/")[2] for name in line if name.startswith("perf/predicted/")}
        assert {"gen", "values", "update_critic", "update_actor", "step", "peak_memory"} <= parts
        assert all(f"timing_s/{part}" in line for part in parts - {"peak_memory"})
        total = sum(line[f"perf/predicted/{part}"] for part in parts - {"step", "peak_memory"})
        assert line["perf/predicted/step"] == pytest.approx(total)
        assert 0 < line["perf/peak_memory"] < 64
    assert steps[0]["perf/predicted/peak_memory"] == pytest.approx(steps[0]["perf/peak_memory"])


def test_the_first_step_corrects_the_later_ones(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo_config(model, tmp_path / "run")
    roles: Any = SimpleNamespace(actor=SimpleNamespace(call_list=lambda _: [3 * 2**30]))
    predictor = make_predictor(config, roles)
    assert predictor is not None
    raw: dict[str, float] = {}
    monkeypatch.setattr(RunPlan, "predict", lambda *_: raw)

    def predicted(**measured: float) -> dict[str, float]:
        batch = small_batch()
        batch.batch["attention_mask"] = torch.ones(6, 5)
        found = predictor(batch, {f"timing_s/{name}": took for name, took in measured.items()})
        assert found.pop("perf/peak_memory") == found.pop("perf/predicted/peak_memory") == 3
        return {name.removeprefix("perf/predicted/"): seconds for name, seconds in found.items()}

    raw |= {"gen": 2.0, "ref": 1.0}
    assert predicted(gen=3.0) == {"gen": 2.0, "step": 2.0}
    raw |= {"gen": 4.0}
    assert predicted(gen=40.0, ref=2.0) == {"gen": 6.0, "ref": 1.0, "step": 7.0}
    assert predicted(gen=1.0, ref=1.0) == {"gen": 6.0, "ref": 2.0, "step": 8.0}


def test_what_updates_use_of_an_accelerator() -> None:
    """By hand: 3 passes of 2 FLOPs a parameter and token, and of attention over half of each square."""
    shape = read_shape(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
        "m",
    )
    rows = StepRows(8, 10.0, Lengths.of([20.0] * 8), 2)
    costs = Costs(Cluster(HARDWARE["H100"], 2))
    attention = 2 * 2 * 4 * (4 + 4) * 8 * 30**2 / 2
    once = 2 * shape.active * 8 * 30 + attention
    found = costs.mfu(shape, rows, 0.5, 2)
    assert found == pytest.approx(3 * once / 0.5 / 2 / HARDWARE["H100"].peak, rel=1e-3)
    assert costs.mfu(shape, rows, 0.5, 2, lora=True) == pytest.approx(found * 2 / 3)


def test_the_cpu_is_measured() -> None:
    cpu = measured_cpu()
    assert 1e8 < cpu.peak < 1e15 and 1e8 < cpu.bandwidth < 1e13 and cpu.memory > 2**28
    assert 1e-8 < cpu.operation < 1e-2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is reset by Linux")
def test_a_peak_is_that_since_the_last_question() -> None:
    peak_since_asked()
    small = peak_since_asked()
    block = torch.ones(32 * 2**20)  # 128 MiB
    large = peak_since_asked()
    del block
    assert large - small > 100 * 2**20
