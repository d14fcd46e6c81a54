"""Builds a vLLM engine from the configuration, in this process or over a server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.remote.model import ModelFacts, ReplicaPlace
from hybridflow.rollout.remote.runner import Follower
from hybridflow.rollout.vllm.engine import AdapterRunner, VLLMEngine
from hybridflow.rollout.vllm.in_process import InProcess
from hybridflow.rollout.vllm.server import VLLMServer
from hybridflow.rollout.vllm.settings import engine_arguments, start_server


def build_vllm_engine(
    config: RolloutConfig, model: ModelFacts, eos_token_ids: Sequence[int], place: ReplicaPlace | None = None
) -> VLLMEngine:
    """Return the engine of a rank of a replica; RolloutError where it does not start."""
    place = place or ReplicaPlace()
    server = config.server
    arguments = engine_arguments(config, model)
    runner: AdapterRunner
    several = place.replicas * config.tensor_model_parallel_size > 1
    beside = (several or server.python is not None) if server.enable is None else server.enable
    if not place.leads:
        runner = Follower(str(model.device), adapters=config.lora_as_adapters)
    elif server.address is None and not beside:
        runner = InProcess(arguments)
    else:
        start = partial(
            start_server,
            arguments,
            python=server.python,
            timeout=server.start_timeout,
            visible=place.visible,
        )
        runner = VLLMServer.of(config, place.number, start, adapters=config.lora_as_adapters)
    texts = not arguments.get("skip_tokenizer_init", False)
    engine = VLLMEngine(
        runner, eos_token_ids=eos_token_ids, frees_cache=config.free_cache_engine, texts=texts
    )
    if config.quantization:
        engine.must_be_quantized(config.quantization)
    return engine
