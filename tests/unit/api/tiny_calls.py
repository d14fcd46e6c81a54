"""Arguments of calls that take a second: a tiny model, twelve sums, two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers.jsonl import read_metrics

TIMINGS = ("timing_s/", "fully_async/", "perf/", "reward/seconds")
"""Metrics that no two runs share."""
ROWS = [
    {"prompt": [{"role": "user", "content": f"{number} + 2 = ?"}], "answer": str(number + 2)}
    for number in range(12)
]
KEYS: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_prompt_length": 32, "max_response_length": 6},
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 4, "use_kl_loss": False},
        "rollout": {"n": 2},
    },
    "trainer": {"total_training_steps": 2, "logger": [], "num_threads": 1},
}
SFT_KEYS: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_length": 64},
    "trainer": {"total_training_steps": 2, "logger": [], "num_threads": 1},
}


def tiny_model(folder: Path) -> Path:
    return create_tiny_model(folder, hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48)


def digits(response: str) -> float:
    """The share of digits, a reward that varies from row to row."""
    return sum(each.isdigit() for each in response) / max(1, len(response))


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in line.items() if not name.startswith(TIMINGS)}
        for step, line in read_metrics(run / "metrics.jsonl").items()
    }
