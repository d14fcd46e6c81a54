"""Build the generation engine that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import ConfigError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.copies.quantized_copy import QuantizedCopy
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine, WeightSource


def build_rollout_engine(
    config: RolloutConfig,
    policy: PolicyModel,
    eos_token_ids: Sequence[int],
    *,
    source: WeightSource | None = None,
    replica: ReplicaRanks | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    lora: LoraSettings | None = None,
    device: torch.device | None = None,
) -> RolloutEngine:
    """Return the engine named by `rollout.name`, which generates with `policy`; ConfigError where unknown.

    `source` fills the policy's weights while the engine is awake; left out: they are always there. `replica`:
    the ranks it generates with. `decode`: token ids to text, needed where `rollout.stop` is set. For rounded
    weights (`rollout.quantization`), `lora` has the policy's adapters, and `device` is where they are to
    be; left out: where the policy is.
    """
    if config.name == "native":
        from hybridflow.rollout.native.drafts import DraftSettings
        from hybridflow.rollout.native.engine import NativeEngine

        drafts = None
        if config.speculative.enable:
            drafts = DraftSettings(config.speculative.num_draft_tokens, config.speculative.max_tokens)
        quantized = None
        if config.quantization is not None:
            quantized = QuantizedCopy(policy, config.quantization, device=device, lora=lora, replica=replica)
        return NativeEngine(
            policy,
            eos_token_ids=eos_token_ids,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
            enforce_eager=config.enforce_eager,
            cudagraph_capture_sizes=config.cudagraph_capture_sizes,
            kv_cache=config.kv_cache,
            records_routes=config.enable_rollout_routing_replay,
            source=source,
            replica=replica,
            decode=decode,
            quantized=quantized,
            drafts=drafts,
        )
    if config.name == "hf":
        if replica is not None and replica.size > 1:
            raise ConfigError(
                "actor_rollout_ref.rollout.name=hf generates on one rank: set "
                "rollout.tensor_model_parallel_size=1"
            )
        from hybridflow.rollout.hf.engine import HFEngine

        return HFEngine(
            policy.hf,
            eos_token_ids=eos_token_ids,
            max_num_seqs=config.max_num_seqs,
            source=source,
            decode=decode,
        )
    raise ConfigError(
        f"actor_rollout_ref.rollout.name={config.name!r} does not generate with the module that trains: use "
        "native or hf"
    )
