"""Keys of the run as options of SGLang's server."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.memory import free_memory
from hybridflow.rollout.remote.http import Address
from hybridflow.rollout.remote.model import ModelFacts, cache_bytes_per_token
from hybridflow.rollout.remote.process import ServerProcess
from hybridflow.rollout.sglang.loader import QUALIFIED_NAME

ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""Environment variables of SGLang. Its health check must not generate before weights have been pushed."""
_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "grammar_backend": "none",
}
"""Options that SGLang's Python engine needs on a CPU."""


def positions_of(config: RolloutConfig, model: ModelFacts) -> int:
    """Return the largest number of tokens of prompt and response together."""
    return config.max_model_len or int(getattr(model.shape(), "max_position_embeddings", 4096))


def server_arguments(config: RolloutConfig, model: ModelFacts) -> dict[str, Any]:
    """Return the options of `sglang.launch_server` by name; `engine_kwargs.sglang` overrides them."""
    on_cpu = model.device.type == "cpu"
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": model.override_config or None,
        "dtype": model.dtype if config.dtype == "auto" else config.dtype,
        "context_length": positions_of(config, model),
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_model_parallel_size,
        "disable_cuda_graph": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "disable_radix_cache": not config.enable_prefix_caching,
        "enable_memory_saver": config.free_cache_engine and not on_cpu,
        "enable_weights_cpu_backup": config.free_cache_engine and not on_cpu,
        "load_format": config.load_format,
        "quantization": config.quantization,
        "sampling_backend": "pytorch",  # the place where `sampler` draws
        "sampling_defaults": "openai",  # not the model's: they would change sampling
        "custom_weight_loader": [QUALIFIED_NAME],
        "incremental_streaming_output": True,
        "skip_server_warmup": True,
        "log_level": "warning",
        **(_ON_CPU if on_cpu else {}),
    }
    arguments = {
        name: value for name, value in arguments.items() if value is not None
    } | config.engine_kwargs.sglang
    if on_cpu and "max_total_tokens" not in arguments:  # else a share of the whole machine's memory, at once
        arguments["max_total_tokens"] = _cache_tokens(config, model, str(arguments["dtype"]))
    return arguments


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Return the arguments as options of SGLang's server, which has no option to turn a switch off."""
    options = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options += [flag] if value else []
        elif isinstance(value, list):
            options += [flag, *(str(each) for each in value)]
        else:
            options += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return options


def start_server(
    arguments: dict[str, Any], *, python: str | None, timeout: float
) -> tuple[Address, ServerProcess]:
    """Start SGLang's server as `ServerProcess.start` does."""
    command = [python or sys.executable, "-m", "sglang.launch_server", *command_line(arguments)]
    environment = {**os.environ, **ENVIRONMENT}
    if arguments.get("device") == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    return ServerProcess.start(command, environment, engine="sglang", timeout=timeout)


def _cache_tokens(config: RolloutConfig, model: ModelFacts, dtype: str) -> int:
    """Return the tokens of `max_num_seqs` full rows, within `gpu_memory_utilization` of free memory."""
    each = cache_bytes_per_token(model.shape(), dtype)
    wanted = config.max_num_seqs * (positions_of(config, model) + 1)
    return int(min(wanted, config.gpu_memory_utilization * free_memory(torch.device("cpu")) // each))
