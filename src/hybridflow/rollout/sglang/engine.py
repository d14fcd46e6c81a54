"""SGLang as a `RolloutEngine`, built from the configuration, with sampling parameters in SGLang's terms."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.memory import free_memory
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.remote.http import Address, ServerProcess
from hybridflow.rollout.remote.model import ModelFacts, ReplicaPlace, cache_bytes_per_token
from hybridflow.rollout.remote.runner import EngineRunner, Follower
from hybridflow.rollout.sglang.loader import QUALIFIED_NAME
from hybridflow.rollout.sglang.server import SGLangServer

LOWEST_TEMPERATURE = 1e-6
"""SGLang treats lower temperatures as greedy."""
LARGEST_PENALTY = 2.0
_SEEDS = 1 << 63


def sglang_problem(sampling: SamplingParams, *, vocabulary: int, texts: bool) -> str | None:
    """Return why SGLang cannot serve these parameters, or None. `texts`: it has a tokenizer."""
    if not sampling.takes_argmax and sampling.temperature < LOWEST_TEMPERATURE:
        return (
            f"temperature={sampling.temperature}: sglang has none between 0 and {LOWEST_TEMPERATURE}; "
            "use greedy, or a higher one"
        )
    if sampling.repetition_penalty > LARGEST_PENALTY:
        return f"repetition_penalty={sampling.repetition_penalty}: sglang takes at most {LARGEST_PENALTY:.0f}"
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            return f"logit_bias holds token id {token}, and the model's vocabulary is 0..{vocabulary - 1}"
        if not math.isfinite(bias):
            return f"logit_bias of token {token} is {bias}: sglang takes finite numbers"
    if sampling.stop and not texts:
        return "stop has texts, and this sglang has no tokenizer (skip_tokenizer_init): use stop_token_ids"
    if sampling.ignore_eos and sampling.stop_token_ids and sampling.min_tokens:
        return (
            "min_tokens with ignore_eos and stop_token_ids: sglang would forbid the end token too; leave "
            "one of them out"
        )
    return None


def sglang_params(request: GenerationRequest, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the `sampling_params` of /generate, the number of log-probs, and the stop tokens to look for in
    the stream here: with `ignore_eos` SGLang ignores every one.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": 0.0 if sampling.takes_argmax else sampling.temperature,
        "sampling_seed": request.seed % _SEEDS,
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if not sampling.ignore_eos:
        params |= {
            "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
            "min_new_tokens": sampling.min_tokens,
        }
    if sampling.limits_tokens:
        params |= {
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    cuts = sorted(sampling.stop_token_ids) if sampling.ignore_eos else []
    return {"sampling_params": params, "top_logprobs_num": sampling.top_log_probs, "cuts": cuts}


class SGLangEngine(PushedEngine):
    """An SGLang server with weights that are pushed."""

    def cannot(self, request: GenerationRequest) -> str | None:
        """Return why SGLang cannot serve the request, or None."""
        return sglang_problem(request.sampling, vocabulary=self._facts["vocabulary"], texts=self.texts)

    def params(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the fields of /generate besides the prompt."""
        return sglang_params(request, self.eos_token_ids)


def build_sglang_engine(
    config: RolloutConfig, model: ModelFacts, eos_token_ids: Sequence[int], place: ReplicaPlace | None = None
) -> SGLangEngine:
    """Return the engine of a rank of a replica, over its server; RolloutError where it does not start."""
    place = place or ReplicaPlace()
    server = config.server
    arguments = server_arguments(config, model)
    runner: EngineRunner = Follower(str(model.device))
    if place.leads:
        start = partial(
            start_server,
            arguments,
            python=server.python,
            timeout=server.start_timeout,
            visible=place.visible,
        )
        vocabulary = int(model.shape().vocab_size)
        positions = positions_of(config, model)
        runner = SGLangServer.of(config, place.number, start, vocabulary=vocabulary, positions=positions)
    texts = not arguments.get("skip_tokenizer_init", False)
    return SGLangEngine(
        runner, eos_token_ids=eos_token_ids, frees_cache=config.free_cache_engine, texts=texts
    )


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
        "ep_size": config.expert_parallel_size,
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
    arguments: dict[str, Any], *, python: str | None, timeout: float, visible: Mapping[str, str] | None = None
) -> tuple[Address, ServerProcess]:
    """Start SGLang's server as `ServerProcess.start` does; `visible`: variables that show it devices."""
    command = [python or sys.executable, "-m", "sglang.launch_server", *command_line(arguments)]
    environment = {**os.environ, **(visible or {}), **ENVIRONMENT}
    if arguments.get("device") == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        ranks = int(arguments["tp_size"])
        if ranks > 1:  # else SGLang wants a NUMA node for each
            every = f"0-{(os.cpu_count() or 1) - 1}"
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([every] * ranks))
    return ServerProcess.start(command, environment, engine="sglang", timeout=timeout)


def _cache_tokens(config: RolloutConfig, model: ModelFacts, dtype: str) -> int:
    """Return the tokens of `max_num_seqs` full rows, within `gpu_memory_utilization` of free memory."""
    each = cache_bytes_per_token(model.shape(), dtype)
    wanted = config.max_num_seqs * (positions_of(config, model) + 1)
    return int(min(wanted, config.gpu_memory_utilization * free_memory(torch.device("cpu")) // each))
