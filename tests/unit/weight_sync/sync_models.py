"""Tiny policies, whole and spread over the ranks of a group, for the tests of weight sync."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.models.parallel.tensor_parallel import apply_tensor_parallel
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams

VOCABULARY = 37  # odd, so that shards are uneven


def policy(
    kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PolicyModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.4,
        "tie_word_embeddings": kind == "qwen2",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**settings, **changes}))
        for parameter in hf.parameters():
            if parameter.dim() == 1:  # biases are made of zeros
                parameter.data += 0.3 * torch.randn_like(parameter)
    return PolicyModel(hf.to(dtype))


def state(model: PolicyModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def spread(model: PolicyModel, how: str) -> PolicyModel:
    """Over all ranks: `fsdp`, `hsdp` (copies), `tensor` (FSDP × tensor parallelism) or `whole`."""
    ranks = dist.get_world_size()
    if how == "whole":
        return model
    mesh = init_device_mesh("cpu", (ranks,))
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "shard"))
    elif how == "tensor":
        both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tp"))
        apply_tensor_parallel(model, both["tp"])
        mesh = both["shard"]
    for layer in model.hf.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def requests(count: int = 6, n: int = 2, max_tokens: int = 8, **params: Any) -> list[GenerationRequest]:
    draw = torch.Generator().manual_seed(5)
    prompts = [
        tuple(torch.randint(3, VOCABULARY, (2 + row % 5,), generator=draw).tolist()) for row in range(count)
    ]
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return [
        GenerationRequest(i * n + j, Prompt(prompt), sampling, seed=100 * i + j)
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
