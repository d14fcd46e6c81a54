"""The size of a model, counted on the meta device before any of it has memory; and the arithmetic
of a row in FLOPs.

Rows are dealt to ranks by their FLOPs. A matrix product with a parameter costs 2 FLOPs a token and parameter;
the two products of causal attention cost 2·(D + Dv)·heads·L²/2 a layer for a row of L tokens (fewer under a
sliding window). Norms, softmax and sampling are left out, as is usual for MFU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.config.model import ModelConfig
from hybridflow.models.adapters.lora import LoraSettings, add_lora, quantized_layers
from hybridflow.models.blocks import decoder_blocks
from hybridflow.models.experts.layers import expert_modules, experts_per_token, mlp_width, num_experts
from hybridflow.models.files.build import auto_class, resolve_dtype, shape_of
from hybridflow.models.parallel.tensor_parallel import check_sizes, tensor_slices, tensor_styles
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.models.vision import Vision, language_class, settle_tower
from hybridflow.planner.model_size import Count, ModelSize
from hybridflow.protocol import Workload

_MODELS: dict[str, type[PolicyModel] | type[ValueModel]] = {"policy": PolicyModel, "value": ValueModel}


def _count(parameters: Iterable[nn.Parameter], cut: set[int], experts: set[int]) -> Count:
    """Count `parameters`; `cut` has the ids of those that tensor parallelism cuts, `experts` of experts'."""
    each = {id(parameter): parameter for parameter in parameters}
    numbers = []
    for among in (set(each), cut, experts):
        some = [parameter for number, parameter in each.items() if number in among]
        numbers.append(sum(parameter.numel() for parameter in some))
        numbers.append(sum(parameter.numel() for parameter in some if parameter.requires_grad))
    return Count(*numbers)


def size_of(
    kind: Literal["policy", "value"],
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    lora: LoraSettings | None = None,
    trained: bool = True,
    tensor: int = 1,
    experts_apart: bool = False,
    blocks: bool = False,
) -> ModelSize:
    """Count the model that `build_engine` would make of these arguments; no weights are read.

    `tensor` is the number of ranks that cut its layers; with `experts_apart` they share whole experts.
    `blocks` counts block and root too, which are 0 otherwise. Raises ModelError as building the model would.
    """
    shape = shape_of(config)
    compute = resolve_dtype(dtype, device)
    with torch.device("meta"):
        hf = auto_class(kind, shape).from_config(
            shape, dtype=compute, attn_implementation="eager", trust_remote_code=config.trust_remote_code
        )
        active = matmul_parameters(hf)
        module: PolicyModel | ValueModel = _MODELS[kind](hf)
    if trained:
        settle_tower(module.vision, module.config, freeze=config.freeze_vision_tower)
    cut: set[int] = set()
    if tensor > 1:
        base = hf
        if kind == "value":
            base = hf.base_model
        check_sizes(base, tensor_styles(base, but_experts=experts_apart), tensor)
        cut = {id(base.get_parameter(name)) for name in tensor_slices(base, but_experts=experts_apart)}
    experts = {id(each) for part in expert_modules(hf).values() for each in part.parameters()}
    quantized: list[int] = []
    if lora is not None:
        add_lora(module, lora)
        for layer in quantized_layers(module).values():
            quantized.append(layer.in_features * layer.out_features)
            layer.restore(layer.weight)  # to be counted among the parameters
    if not trained:
        module.requires_grad_(False)
    whole = _count(module.parameters(), cut, experts)
    tower = Count(0, 0)
    if module.vision is not None:
        tower = _count(module.vision.tower.parameters(), cut, experts)
    root = block = Count(0, 0)
    if blocks:
        parts = [_count(part.parameters(), cut, experts) for part in decoder_blocks(module)]
        block = max(parts, key=lambda part: part.all)
        inside = {id(parameter) for part in decoder_blocks(module) for parameter in part.parameters()}
        outside = (parameter for parameter in module.parameters() if id(parameter) not in inside)
        root = _count(outside, cut, experts)
    text = shape.get_text_config()
    heads = text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    return ModelSize(
        whole,
        root,
        block,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=mlp_width(shape),
        num_heads=heads,
        # latent attention (MLA) hands each head a key and a value of its own
        num_kv_heads=heads if latent else getattr(text, "num_key_value_heads", None) or heads,
        head_dim=_attention_width(text) // (2 * heads),
        vocab_size=text.vocab_size,
        itemsize=compute.itemsize,
        active=active,
        experts=num_experts(shape),
        experts_per_token=experts_per_token(shape),
        tower=tower,
        quantized=sum(quantized),
        largest_quantized=max(quantized, default=0),
    )


def matmul_parameters(hf: PreTrainedModel) -> int:
    """Return the number of parameters that a token is multiplied with.

    The input embedding does not count, of experts only those that a token is routed to, and nothing of a
    tower, which reads pictures and no tokens.
    """
    config = hf.config.get_text_config()
    table = hf.get_input_embeddings().weight
    head = hf.get_output_embeddings()
    experts = num_experts(config)
    vision = Vision.of(hf.base_model)
    outside = set() if vision is None else set(map(id, vision.outside_parameters()))
    total = 0.0
    for name, parameter in hf.named_parameters():
        if parameter is table or id(parameter) in outside:
            continue
        if experts and ".experts." in name:
            total += parameter.numel() * experts_per_token(config) / experts
        else:
            total += parameter.numel()
    if head is not None and head.weight is table:  # tied: the head's product is real
        total += table.numel()
    return int(total)


def active_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> int:
    """Return `matmul_parameters` of the causal LM that `config` describes, without allocating it."""
    with torch.device("meta"):
        return matmul_parameters(
            language_class(config).from_config(config, trust_remote_code=trust_remote_code)
        )


def workload_of(config: PretrainedConfig, num_parameters: int) -> Workload:
    """Return the cost of a row in FLOPs of a forward pass, by which rows are balanced over ranks.

    `num_parameters` is `matmul_parameters`.
    A layer with a sliding window counts as linear, as for rows much longer than its window.
    """
    text = config.get_text_config()
    pair = 2 * _attention_width(text)  # FLOPs of one query-key pair
    longest = getattr(text, "max_position_embeddings", None)
    windows = [
        None if window is None or (longest and window >= longest) else window for window in _windows(text)
    ]
    linear = 2 * num_parameters + pair * sum(window for window in windows if window is not None)
    return Workload(float(linear), float(pair * windows.count(None) / 2))


def _attention_width(config: PretrainedConfig) -> int:
    """Return heads · (D + Dv), the multiplications for one query-key pair in one layer."""
    heads: int = config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    query: int = getattr(config, "qk_head_dim", None) or dim
    value: int = getattr(config, "v_head_dim", None) or dim
    return heads * (query + value)


def _windows(config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer, None for a layer that sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        by_kind = {"sliding_attention": window}
        return [by_kind.get(kind) for kind in kinds]
    if not getattr(config, "use_sliding_window", True):
        window = None
    return [window] * config.num_hidden_layers
