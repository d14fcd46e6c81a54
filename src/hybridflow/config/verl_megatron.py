"""verl's keys of Megatron-LM, mapped onto the layouts of PyTorch's own engine.

    actor.megatron.pipeline_model_parallel_size=2 ──► actor.fsdp_config.pipeline_parallel_size=2

The sizes mean the same in both. What tunes Megatron's own kernels and buffers has no effect, because there
are none; what would change results is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.config.verl_rule import OFF, OFF_OR_ONE, Rule, ignored, off, only, seed

ENGINE = "PyTorch's own engine (FSDP2, tensor parallelism, stages by 1F1B), not Megatron-LM"
ROLES = r"(actor_rollout_ref\.(?:actor|ref)|critic|reward\.reward_model)\.megatron\."
BASE = "ppo_megatron_trainer"
"""verl's name for the file of all keys whose strategy is megatron."""
CHECKPOINTING = "enable_gradient_checkpointing"

MEGATRON_ALIASES: tuple[tuple[str, str], ...] = (
    (ROLES + r"tensor_model_parallel_size", r"\1.fsdp_config.tensor_parallel_size"),
    (ROLES + r"pipeline_model_parallel_size", r"\1.fsdp_config.pipeline_parallel_size"),
    (ROLES + r"virtual_pipeline_model_parallel_size", r"\1.fsdp_config.virtual_pipeline_parallel_size"),
    (ROLES + r"context_parallel_size", r"\1.ulysses_sequence_parallel_size"),
    (ROLES + r"expert_model_parallel_size", r"\1.fsdp_config.expert_parallel_size"),
    (ROLES + r"(param_offload|optimizer_offload|use_torch_compile)", r"\1.fsdp_config.\2"),
    (ROLES + r"dtype", r"\1.fsdp_config.mixed_precision.param_dtype"),
    (r"(.+\.override_config)\.model_config\.(.+)", r"\1.\2"),
)

MEGATRON_VALUES: Mapping[str, Mapping[Any, Any]] = {
    f"{block}.fsdp_config.{name}": {None: 1}
    for block in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward.reward_model")
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "virtual_pipeline_parallel_size",
        "expert_parallel_size",
    )
} | {
    f"{block}.{CHECKPOINTING}": {"full": True, None: False}
    for block in ("actor_rollout_ref.model", "critic.model")
}

MEGATRON_ALIASES_BY_VALUE: tuple[tuple[str, tuple[Any, ...], str], ...] = tuple(
    (rf"{block}\.megatron\.override_transformer_config\.recompute_granularity", ("full", None), model)
    for block, model in (
        (r"actor_rollout_ref\.actor", f"actor_rollout_ref.model.{CHECKPOINTING}"),
        ("critic", f"critic.model.{CHECKPOINTING}"),
    )
)
"""Each layer is recomputed on its own (full), or none is (null)."""

_KEY = r".+\.megatron\."
_TRANSFORMER = _KEY + r"override_transformer_config\."
_KERNELS = (
    r"(\w*fusion|\w*fused\w*|moe_(permute|grouped_gemm|enable_deepep|token_dispatcher_type|"
    r"shared_expert_overlap|pad_expert_input_to_capacity|flex_dispatcher_backend)\w*|attention_backend|"
    r"deallocate_pipeline_outputs|persist_layer_norm|tp_comm_\w+|overlap_\w+|cuda_graph\w*|"
    r"cross_entropy_\w+|variable_seq_lengths|batch_p2p_comm)"
)
_CUTS = r"(num_layers_in_(first|last)_pipeline_stage|account_for_\w+|pipeline_model_parallel_layout)"

MEGATRON_RULES: tuple[Rule, ...] = (
    Rule(
        r"(critic|actor_rollout_ref\.ref|reward\.reward_model)\.strategy",
        (None, "fsdp", "fsdp2", "megatron"),
        f"the engine is {ENGINE}",
        "set fsdp2 or megatron",
    ),
    only(r"model_engine", (None, "dp", "megatron"), f"the engine is {ENGINE}"),
    Rule(
        _KEY + r"(tensor_model|pipeline_model|expert_model|context)_parallel_size",
        OFF_OR_ONE,
        "this model is divided as the actor is",
        "this model is divided as the actor is: set the size in actor_rollout_ref.actor.megatron",
    ),
    only(
        _KEY + r"expert_tensor_parallel_size",
        (None, 1),
        "an expert is whole, and FSDP2 shards its parameters",
    ),
    ignored(
        _KEY + r"sequence_parallel",
        "what lies between the cut layers is whole on each rank of a group: it changes memory and no result",
    ),
    ignored(_KEY + r"use_distributed_optimizer", "FSDP2 always divides the optimizer's state"),
    ignored(_KEY + r"grad_offload", "gradients are freed after each optimizer step"),
    ignored(
        _KEY + r"(use_mbridge|vanilla_mbridge|use_megatron_bridge|load_weight|dist_checkpointing_prefix)",
        "weights are read and written in Hugging Face's form, without conversion",
    ),
    ignored(
        _KEY + r"use_dist_checkpointing",
        "checkpoints are always those of torch.distributed.checkpoint, which any layout reads",
    ),
    off(
        _KEY + r"dist_checkpointing_path",
        "weights in Megatron's own form are not read: leave it out, and give the Hugging Face folder as "
        "actor_rollout_ref.model.path",
    ),
    ignored(_KEY + r"override_ddp_config\..+", "FSDP2 reduces gradients in mixed_precision.reduce_dtype"),
    ignored(
        r"(actor_rollout_ref\.ref|reward\..+)\.megatron\.override_transformer_config\.recompute_\w+",
        "a model that is not trained keeps no activations",
    ),
    Rule(
        _TRANSFORMER + r"recompute_granularity",
        ("selective",),
        f"model.{CHECKPOINTING}, on by default, recomputes whole layers, and no parts of them on their own",
        "set full (each layer is recomputed), selective or null (none is)",
    ),
    ignored(
        _TRANSFORMER + r"recompute_(method|num_layers)",
        "with recompute_granularity=full each layer is recomputed on its own, as by uniform with one layer",
    ),
    ignored(_TRANSFORMER + r"recompute_\w+", "parts of a layer are not recomputed on their own"),
    ignored(_TRANSFORMER + _CUTS, "layers are cut so that the dearest stage costs as little as it can"),
    ignored(_TRANSFORMER + _KERNELS, "it chooses among kernels and buffers of Megatron-LM"),
    ignored(
        _TRANSFORMER + r"moe_router_dtype",
        "routers compute as transformers' own code does, with probabilities in float32",
    ),
    Rule(
        _TRANSFORMER + r"moe_(aux_loss_coeff|router_load_balancing_type)",
        (*OFF, "aux_loss"),
        "the auxiliary loss of experts is off unless router_aux_loss_coef says its weight",
        "set actor_rollout_ref.actor.router_aux_loss_coef",
    ),
    only(_TRANSFORMER + r".+", OFF, "transformers' own code of the model is trained, with its configuration"),
    seed(_KEY + r"seed"),
    only(_KEY + r".+", OFF, "this setting of Megatron-LM has no counterpart here"),
)
