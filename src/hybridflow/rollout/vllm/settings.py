"""Arguments of vLLM's engine from the keys of the run, the same for an engine in this process and for a
server.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.memory import free_memory
from hybridflow.rollout.remote.http import Address, ServerProcess
from hybridflow.rollout.remote.model import ModelFacts, cache_bytes_per_token
from hybridflow.rollout.vllm.extension import QUALIFIED_NAME

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler is not the one whose log-probs `Extension` corrects
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads would fight with those of the trainer
}
"""Environment variables of vLLM; those that the user has set are kept."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's max_lora_rank may have."""
_CPU_BLOCK = 128
"""Number of tokens of a block of vLLM's cache on a CPU."""
MODEL = "policy"
"""Name of the model in a server that is started here."""


def engine_arguments(config: RolloutConfig, model: ModelFacts) -> dict[str, Any]:
    """Return the arguments of vLLM's engine by name; `engine_kwargs.vllm` overrides them."""
    on_cpu = model.device.type == "cpu"
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    shape = model.shape()
    longest = config.max_model_len or int(getattr(shape, "max_position_embeddings", 4096))
    arguments: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": model.override_config or None,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(
            config.max_num_batched_tokens, config.max_num_seqs, longest if on_cpu else 0
        ),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        # on CPU a seeded request whose prompt is cut would end vLLM's worker: it turns the generator back,
        # which none of the CPU can
        "enable_chunked_prefill": config.enable_chunked_prefill and not on_cpu,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_sleep_mode": config.free_cache_engine and not on_cpu,
        "load_format": config.load_format,
        "quantization": config.quantization,
        "generation_config": "vllm",  # not the model's: it would change sampling
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": QUALIFIED_NAME,
        "tokenizer": model.tokenizer,
    }
    if config.lora_as_adapters:
        largest = next((size for size in _LORA_RANKS if size >= model.lora_rank), model.lora_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}
    arguments = {
        name: value for name, value in arguments.items() if value is not None
    } | config.engine_kwargs.vllm
    # else vLLM would take a share of the whole machine's memory at once
    if on_cpu and "kv_cache_memory_bytes" not in arguments:
        arguments["kv_cache_memory_bytes"] = _cache_bytes(config, shape, dtype, longest)
    return arguments


def _cache_bytes(config: RolloutConfig, shape: Any, dtype: str, longest: int) -> int:
    """Return the bytes of `max_num_seqs` full rows, within `gpu_memory_utilization` of free memory."""
    blocks = (config.max_num_seqs + 1) * math.ceil(longest / _CPU_BLOCK)
    wanted = blocks * _CPU_BLOCK * cache_bytes_per_token(shape, dtype)
    return int(min(wanted, config.gpu_memory_utilization * free_memory(torch.device("cpu"))))


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Return the arguments as options of vLLM's server."""
    options = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(flag if value else "--no-" + flag[2:])
        else:
            options += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return options


def start_server(
    arguments: dict[str, Any], *, python: str | None, timeout: float, visible: Mapping[str, str] | None = None
) -> tuple[Address, ServerProcess]:
    """Start vLLM's OpenAI server as `ServerProcess.start` does; `visible`: variables that show it devices."""
    module = "vllm.entrypoints.openai.api_server"
    options = ["--served-model-name", MODEL, "--disable-log-stats", *command_line(arguments)]
    # /collective_rpc, /reset_prefix_cache, /sleep; /v1/load_lora_adapter
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    command = [python or sys.executable, "-m", module, *options]
    return ServerProcess.start(
        command, {**ENVIRONMENT, **os.environ, **(visible or {}), **dev_mode}, engine="vllm", timeout=timeout
    )
