"""Tiny random models of many architectures, and rows to feed them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch, make_rows, pack

VOCABULARY = 64
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "head_dim": 4,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GEMMA: dict[str, Any] = {"sliding_window": 4, "query_pre_attn_scalar": 16}
ALTERNATING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": {**ALTERNATING, "sliding_window": 4},
    "glm4": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {**GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    "gemma3_text": {**GEMMA, **ALTERNATING},
    "phi3": {"sliding_window": 5},
    "gpt_oss": {**ALTERNATING, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE,
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24, "head_dim": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**MOE, **ROUTED},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None},
    "deepseek_v3": {**MOE, **LATENT, **ROUTED, "num_key_value_heads": 4},
    "glm4_moe_lite": {**MOE, **LATENT, **ROUTED, "num_key_value_heads": 4},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2},
    "gpt_neox": {},
}

SPARSE = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "olmoe"),
)
"""Families with experts."""


def tiny_hf(
    model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random model whose attention really matters (large initial weights, random sinks)."""
    settings = {**BASE, **SUPPORTED.get(model_type, {}), **changes}
    if settings["head_dim"] is None:  # some compute it
        del settings["head_dim"]
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in hf.named_parameters():
            # norms, biases and sinks start at 0 or 1, which would hide mistakes
            if parameter.dim() == 1 or name.endswith("sinks"):
                parameter.data += 0.3 * torch.randn_like(parameter)
    return hf.to(dtype).eval()


def tiny_rows(
    lengths: tuple[tuple[int, int], ...] = ((3, 6), (7, 5), (2, 1), (5, 9)), seed: int = 1
) -> DataProto:
    """Rows of (prompt, response) lengths with random tokens."""
    draw = torch.Generator().manual_seed(seed)
    prompts, responses = (
        [torch.randint(3, VOCABULARY, (pair[i],), generator=draw).tolist() for pair in lengths]
        for i in (0, 1)
    )
    return DataProto.from_dict(make_rows(prompts, responses, pad_id=0))


def packed_rows(data: DataProto, order: list[int] | None = None) -> PackedBatch:
    """`data` packed, in another row order if asked for."""
    return pack(data if order is None else data.select_idxs(order))


def eager_log_probs(hf: PreTrainedModel, packed: PackedBatch) -> Tensor:
    """[M]: each row run alone by transformers with its eager attention."""
    hf.set_attn_implementation("eager")
    logits = torch.cat(
        [hf(input_ids=row[None], use_cache=False).logits[0] for row in packed.input_ids.split(packed.lengths)]
    )
    return logits.log_softmax(-1)[packed.predict_index].gather(-1, packed.targets[:, None])[:, 0]
