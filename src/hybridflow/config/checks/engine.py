"""Refuse what the chosen generation engine cannot do, by the table of engines and features."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.checks.cluster import pool_sizes
from hybridflow.config.engine_features import ENGINES, KEY, TABLE
from hybridflow.config.root import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


def engine_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each feature that the keys ask for and that `rollout.name` does not have."""
    column = TABLE[config.actor_rollout_ref.rollout.name]
    for feature, asked in asked_features(config):
        if not column[feature].has:
            able = [name for name, engine in ENGINES.items() if engine.trains and TABLE[name][feature].has]
            others = ""
            if able:
                others = f" (engines that can: {', '.join(able)})"
            name = config.actor_rollout_ref.rollout.name
            yield f"{asked} with {KEY}={name}, which cannot do it: {column[feature].note}{others}"


def asked_features(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yield (feature, the key and value that ask for it)."""
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    for block, sampling in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if sampling.do_sample and sampling.top_k > 0:
            yield "top_k", f"{block}.top_k={sampling.top_k}"
        if sampling.do_sample and sampling.top_p < 1:
            yield "top_p", f"{block}.top_p={sampling.top_p}"
        if sampling.do_sample and sampling.min_p > 0:
            yield "min_p", f"{block}.min_p={sampling.min_p}"
        if sampling.repetition_penalty != 1:
            yield "repetition_penalty", f"{block}.repetition_penalty={sampling.repetition_penalty}"
    for name in ("stop", "stop_token_ids", "quantization"):
        if value := getattr(rollout, name):
            yield name, f"{ROLLOUT}.{name}={value}"
    for name in ("ignore_eos", "exact"):
        if getattr(rollout, name) is True:
            yield name, f"{ROLLOUT}.{name}=true"
    if rollout.enable_rollout_routing_replay:
        yield "routes", f"{ROLLOUT}.enable_rollout_routing_replay=true"
    if rollout.tensor_model_parallel_size > 1:
        yield "tensor_parallel", f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}"
    if model.lora_rank:
        yield "lora", f"{MODEL}.lora_rank={model.lora_rank}"
    elif model.lora_adapter_path:
        yield "lora", f"{MODEL}.lora_adapter_path={model.lora_adapter_path}"
    if (processes := sum(pool_sizes(config.trainer, "actor"))) > 1:
        yield "sharded_training", f"an actor on {processes} processes"
