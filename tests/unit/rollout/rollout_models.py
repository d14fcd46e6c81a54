"""Tiny random models for the generation tests, and requests to feed them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine

VOCABULARY = 48
EOS = 2
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        "sliding_window": 5,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "head_dim": 4,
    },
}


def tiny_hf(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model with weights large enough that attention matters."""
    settings: dict[str, Any] = {
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
        "eos_token_id": EOS,
        "initializer_range": 0.4,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{**settings, **KINDS[kind], **changes})
        )
        for name, parameter in hf.named_parameters():
            if parameter.dim() == 1 or name.endswith("sinks"):
                parameter.data += 0.3 * torch.randn_like(parameter)
    return hf.to(dtype).eval()


def tiny_engine(
    kind: str = "llama", dtype: torch.dtype = torch.float32, *, eos: tuple[int, ...] = (EOS,), **settings: Any
) -> NativeEngine:
    """A native engine on such a model; `settings` are the engine's."""
    return NativeEngine(PolicyModel(tiny_hf(kind, dtype)), eos_token_ids=eos, **settings)


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 12 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=draw).tolist()
    return [tuple(torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()) for length in lengths]


def requests_for(
    token_ids: list[tuple[int, ...]], *, n: int = 1, sampling: SamplingParams | None = None, **params: Any
) -> list[GenerationRequest]:
    """`n` requests for each prompt; request ids count up from 0 and are the seeds too (times 1000)."""
    sampling = sampling or SamplingParams(**{"max_tokens": 12, **params})
    return [
        GenerationRequest(i * n + j, Prompt(prompt), sampling, seed=1000 * (i * n + j))
        for i, prompt in enumerate(token_ids)
        for j in range(n)
    ]


def run(engine: NativeEngine, requests: list[GenerationRequest]) -> dict[int, GenerationOutput]:
    """All outputs by request id."""
    outputs = list(engine.generate(requests))
    assert len(outputs) == len(requests)
    return {output.request_id: output for output in outputs}


class Source:
    """Weights that are there between `acquire` and `release`."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def acquire(self, version: int) -> None:
        self.events.append(version)

    def release(self) -> None:
        self.events.append("released")
