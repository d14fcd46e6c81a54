"""The sizes that a plan reads from config.json are those of the model that transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hybridflow.errors import ModelError
from hybridflow.models.experts.layers import expert_modules
from hybridflow.models.files.size import matmul_parameters, workload_of
from hybridflow.models.parallel.tensor_parallel import tensor_slices
from hybridflow.planner.model_shape import UNCUT, UNDEALT, known_models, load_shape, read_shape, shape_of

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "vocab_size": 500,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "head_dim": 16,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_the_model(kind: str) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(config.to_dict(), kind)
    # biases, norms of heads and convolutions are left out
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert shape.active == pytest.approx(matmul_parameters(model), rel=0.02)
    assert shape.size().whole.all == shape.parameters
    whole = shape.size().whole
    assert whole.experts == sum(
        p.numel() for part in expert_modules(model).values() for p in part.parameters()
    )
    if kind != "qwen3_5_text":  # whose linear attention is refused before it is cut
        cut = sum(model.get_parameter(name).numel() for name in tensor_slices(model, but_experts=True))
        assert shape.can_cut and whole.cut == pytest.approx(cut, rel=0.02)


@pytest.mark.parametrize("kind", sorted({*UNCUT, *UNDEALT}))
def test_kinds_that_are_not_cut_are_those_without_a_plan(kind: str) -> None:
    config: Any = CONFIG_MAPPING[kind]
    plan = {name: style for name, style in (config.base_model_tp_plan or {}).items() if "*" in name}
    dealt = set((getattr(config, "base_model_ep_plan", None) or {}).values())
    if kind in UNCUT:
        assert not plan or "mla_kv_a_proj" in plan.values()
    if kind in UNDEALT:
        assert "grouped_gemm" not in dealt


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_flops_are_those_by_which_rows_are_dealt(kind: str) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind]})
    shape = read_shape(config.to_dict(), kind)
    length = 300
    dealt = workload_of(config, shape.active)
    forward = 2.0 * shape.active * length + shape.causal_flops(length, length**2)
    assert forward == pytest.approx(dealt.linear * length + dealt.quadratic * length**2)


def test_the_cache_keeps_two_vectors_a_layer() -> None:
    shape = shape_of("meta-llama/Llama-3.1-8B-Instruct")
    assert shape.kv_numbers == 32 * 2 * 8 * 128
    assert shape.parameters == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-30B-A3B", 30.5), ("Qwen3-235B-A22B", 235.1), ("DeepSeek-V3", 671), ("Qwen2.5-7B", 7.6)],
)
def test_known_models_are_as_large_as_their_names(name: str, billions: float) -> None:
    assert shape_of(name).parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_every_known_model_can_be_read() -> None:
    for name, facts in known_models().items():
        assert read_shape(facts, name).active > 0


def test_a_folder_a_file_and_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()["Qwen3-4B"]))
    by_folder = load_shape(str(tmp_path))
    assert by_folder.parameters == load_shape(str(tmp_path / "config.json")).parameters
    assert by_folder.parameters == shape_of("Qwen/Qwen3-4B").parameters
    with pytest.raises(ModelError, match=r"Qwen3-4B.*config.json"):
        shape_of("Qwen/Qwen3-4")
    with pytest.raises(ModelError, match="hidden_size"):
        read_shape({"n_embd": 768, "vocab_size": 5, "num_hidden_layers": 2, "num_attention_heads": 2}, "gpt2")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_shape(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="no object with the sizes"):
        load_shape(str(tmp_path))
    with pytest.raises(ModelError, match="do not fit together"):
        read_shape(known_models()["Qwen3-4B"] | {"layer_types": ["full_attention"]}, "short")
