from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from hybridflow.models.files.size import workload_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def forward_flops(parameters: int, length: int) -> float:
    """Count 3 layers with 4 heads of 16 + 16 numbers, which see half of all pairs."""
    return 2 * parameters * length + 3 * 2 * 4 * (16 + 16) * length**2 / 2


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=4_096, max_position_embeddings=4_096)],
)
def test_the_workload_of_a_row_is_the_flops_of_its_forward_pass(config: PretrainedConfig) -> None:
    workload = workload_of(config, 10_000)
    for length in (1, 100, 2_000):
        assert workload.cost(length) == forward_flops(10_000, length)


def test_a_sliding_window_counts_as_linear() -> None:
    config = MistralConfig(**SIZES, sliding_window=64)
    workload = workload_of(config, 10_000)
    assert workload.quadratic == 0.0
    seen = 3 * 2 * 4 * (16 + 16) * (64 * 20_000 - 64**2 / 2)
    assert workload.cost(20_000) == pytest.approx(2 * 10_000 * 20_000 + seen, rel=0.01)
