from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from hybridflow.models.flops import forward_flops, workload_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=4_096, max_position_embeddings=4_096)],
)
def test_the_workload_of_a_row_is_the_flops_of_its_forward_pass(config: PretrainedConfig) -> None:
    workload = workload_of(config, 10_000)
    for length in (1, 100, 2_000):
        assert workload.cost(length) == forward_flops(config, 10_000, [length])


def test_a_sliding_window_counts_as_linear() -> None:
    config = MistralConfig(**SIZES, sliding_window=64)
    workload = workload_of(config, 10_000)
    assert workload.quadratic == 0.0
    assert workload.cost(20_000) == pytest.approx(forward_flops(config, 10_000, [20_000]), rel=0.01)
