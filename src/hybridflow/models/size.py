"""The size of a model, counted on the meta device before any of it has memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from hybridflow.config.model import ModelConfig
from hybridflow.models.blocks import decoder_blocks
from hybridflow.models.build import auto_class, resolve_dtype, shape_of
from hybridflow.models.experts import expert_modules, experts_per_token, mlp_width, num_experts
from hybridflow.models.flops import matmul_parameters
from hybridflow.models.lora import LoraSettings, add_lora
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tensor_parallel import check_sizes, tensor_slices, tensor_styles
from hybridflow.models.value import ValueModel
from hybridflow.models.vision import settle_tower
from hybridflow.planner.model_size import Count, ModelSize

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
    if lora is not None:
        add_lora(module, lora)
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
    hidden = text.hidden_size
    return ModelSize(
        whole,
        root,
        block,
        num_layers=text.num_hidden_layers,
        hidden_size=hidden,
        intermediate_size=mlp_width(shape),
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocab_size=text.vocab_size,
        itemsize=compute.itemsize,
        active=active,
        experts=num_experts(shape),
        experts_per_token=experts_per_token(shape),
        tower=tower,
    )
