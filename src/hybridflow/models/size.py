"""The size of a model, counted on the meta device before any of it has memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hybridflow.config.model import ModelConfig
from hybridflow.models.blocks import decoder_blocks
from hybridflow.models.build import resolve_dtype, shape_of
from hybridflow.models.experts import experts_per_token, mlp_width, num_experts
from hybridflow.models.flops import matmul_parameters
from hybridflow.models.lora import LoraSettings, add_lora
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tensor_parallel import check_sizes, tensor_slices, tensor_styles
from hybridflow.models.value import ValueModel

_MODELS: dict[str, type[PolicyModel] | type[ValueModel]] = {"policy": PolicyModel, "value": ValueModel}


@dataclass(frozen=True)
class Count:
    """Numbers of parameters of a model or a part of it; shared ones count once."""

    all: int
    trained: int
    cut: int = 0
    """Number of all parameters that tensor parallelism cuts."""
    cut_trained: int = 0
    """Number of trained parameters that tensor parallelism cuts."""

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], cut: set[int]) -> Count:
        """Count `parameters`; `cut` has the ids of those that tensor parallelism cuts."""
        each = list({id(parameter): parameter for parameter in parameters}.values())
        trained = [parameter for parameter in each if parameter.requires_grad]
        numbers = (each, trained, [p for p in each if id(p) in cut], [p for p in trained if id(p) in cut])
        return cls(*(sum(parameter.numel() for parameter in some) for some in numbers))

    def on_rank(self, tensor: int, shards: int = 1) -> Count:
        """Return a rank's numbers if `tensor` ranks cut the layers and `shards` share each slice."""

        def held(count: int, cut: int) -> int:
            return math.ceil((count - cut + cut // tensor) / shards)

        return Count(held(self.all, self.cut), held(self.trained, self.cut_trained))


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model."""

    whole: Count
    root: Count
    """Parameters outside of the blocks: embeddings, last norm, head."""
    block: Count
    """Parameters of the largest block."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Activations of the widest feed-forward part for a token: of experts those that it is routed to."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int
    """Bytes of one number in the compute dtype."""
    active: int
    """Parameters that a token is multiplied with: of experts those that it is routed to."""
    experts: int
    """Experts of a sparse layer; 0 for a dense model."""
    experts_per_token: int


def size_of(
    kind: Literal["policy", "value"],
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    lora: LoraSettings | None = None,
    trained: bool = True,
    tensor: int = 1,
    blocks: bool = False,
) -> ModelSize:
    """Count the model that `build_engine` would make of these arguments; no weights are read.

    `tensor` is the number of ranks that cut its layers. `blocks` counts block and root too, which are 0
    otherwise. Raises ModelError as building the model would.
    """
    shape = shape_of(config)
    compute = resolve_dtype(dtype, device)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            shape, dtype=compute, attn_implementation="eager", trust_remote_code=config.trust_remote_code
        )
        active = matmul_parameters(hf)
        module: PolicyModel | ValueModel = _MODELS[kind](hf)
    cut: set[int] = set()
    if tensor > 1:
        base = hf
        if kind == "value":
            base = hf.base_model
        check_sizes(base, tensor_styles(base), tensor)
        cut = {id(base.get_parameter(name)) for name in tensor_slices(base)}
    if lora is not None:
        add_lora(module, lora)
    if not trained:
        module.requires_grad_(False)
    whole = Count.of(module.parameters(), cut)
    root = block = Count(0, 0)
    if blocks:
        parts = [Count.of(part.parameters(), cut) for part in decoder_blocks(module)]
        block = max(parts, key=lambda part: part.all)
        inside = {id(parameter) for part in decoder_blocks(module) for parameter in part.parameters()}
        root = Count.of((parameter for parameter in module.parameters() if id(parameter) not in inside), cut)
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
    )
