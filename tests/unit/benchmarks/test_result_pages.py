"""Pages of the benchmarks are written from results: they say what is met, what is missed, what is noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_models
import cluster_parity
import generation
import grpo_step
import pytest
import side_by_side as kit
import start
import training


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
    assert "1.93 × as fast as the faster of TRL's sides, wanted 2.5: **missed**" in page
    assert "0.25 of the memory of trl, wanted at most 0.25: met" in page
    assert "1.00 of the memory of trl-16, wanted at most 0.7: **missed**" in page
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
    worse = cluster_parity.with_share({**lora, "step_loss": 5e-5})
    (problem,) = cluster_parity.missed(worse, result["steps"])
    assert problem.startswith("ppo/lora: step_loss 5.00e-05 > 1e-05")
    assert cluster_parity.page_of(result) == cluster_parity.RESULT.with_suffix(".md").read_text()


SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
}


def test_the_floor_of_decoding_is_the_longer_of_products_and_reading() -> None:
    parameters = bench_models.parameters_of(SMOLLM2)
    token = bench_models.token_bytes(SMOLLM2)
    assert parameters == 134_479_872 and token == 2 * 4 * 30 * 3 * 64
    by_products = bench_models.decode_floor(SMOLLM2, 15, [2, 1], rate=1e9, bandwidth=1e18)
    assert by_products == pytest.approx(3 * 2 * parameters / 1e9)
    by_reading = bench_models.decode_floor(SMOLLM2, 15, [2, 1], rate=1e18, bandwidth=1e9)
    assert by_reading == pytest.approx((2 * 4 * parameters + (2 * 15 + 16) * token) / 1e9)


def generated(model: str, rows: int, **seconds: list[float]) -> dict[str, Any]:
    return {
        "model": model,
        "threads": 1,
        "rows": rows,
        "lengths": "life",
        "tokens": 100,
        "rate": 5e10,
        "bandwidth": 1e10,
        "vllm": "0.32.0" if "vllm" in seconds else None,
        "floor_s": 0.7,
        "seconds": seconds,
    }


def test_generation_of_both_models_on_one_page() -> None:
    tiny = generated("tiny", 64, native=[1.0, 1.2], transformers=[2.0, 2.4], vllm=[0.9, 1.0])
    real = generated("real", 32, native=[1.0], transformers=[1.5], vllm=[2.0])
    page = generation.page_of([tiny, real])
    assert "64 rows, life: 0.86 times vllm, the fastest rival, wanted 1: **missed**" in page
    assert "0.64 of the floor, wanted 0.6: met" in page
    assert (
        "- 135 M, 1 thread(s), 32 rows, life: 1.50 times transformers, the fastest rival, wanted 1: met"
        in page
    )
    assert "0.70 of the floor, wanted 0.75: **missed**" in page
    assert "left out" not in page and "vLLM is not among the sides" not in page
    few = generated("tiny", 8, native=[1.0], transformers=[2.0])
    page = generation.page_of([few])
    assert "The rows of the 135 M model are left out" in page and "vLLM is not among the sides" in page
    assert "of the floor, wanted" not in page


@pytest.mark.parametrize("name", ["generation", "generation_with_vllm"])
def test_the_committed_page_of_generation_can_be_written_again(name: str) -> None:
    cases = kit.committed(name)["cases"]
    page = generation.page_of(cases)
    assert page.count(", the fastest rival, wanted") == len(cases)


def trained(model: str, pattern: str, task: str, **seconds: list[float]) -> dict[str, Any]:
    sides = {name.replace("_", "-"): {"seconds": each, "cpu": each} for name, each in seconds.items()}
    shape = {"model": model, "rows": 16, "threads": 2, "pattern": pattern, "task": task}
    return {**shape, "sides": sides, "floor_s": 0.5, "apart": 1e-6, "rate": 5e10}


def test_training_of_both_models_on_one_page() -> None:
    cases = [
        trained("tiny", "life", "update", ours=[1.0], trl_16=[1.9], plain=[2.5]),
        trained("tiny", "uniform", "update", ours=[1.0], trl_16=[1.9], plain=[2.5]),
        trained("real", "uniform", "update", ours=[1.0], trl_8=[1.0], plain=[1.15]),
        trained("real", "life", "update", ours=[1.0], trl_8=[1.0], plain=[1.9]),
        trained("real", "life", "log-probs", ours=[1.0], trl_8=[1.0], plain=[1.9]),
    ]
    page = training.page_of({"cases": cases})
    goals = [line for line in page.splitlines() if "wanted" in line]
    assert goals == [
        "- 4.3 M, update, life, 2 thread(s): 1.90 × as fast as trl-16, wanted 2.0: **missed**",
        "- 135 M, update, uniform, 2 thread(s): 1.15 × as fast as plain, wanted 1.1: met",
        "- 135 M, update, life, 2 thread(s): 1.90 × as fast as plain, wanted 2.0: **missed**",
    ]
    assert "left out" not in page
    assert "The rows of the 135 M model are left out" in training.page_of({"cases": cases[:2]})
    width = len(training.HEAD)
    assert all(line.count("|") == width + 1 for line in page.splitlines() if line.startswith("| 135 M"))
