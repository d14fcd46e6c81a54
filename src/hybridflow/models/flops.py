"""The arithmetic of a row in FLOPs, by which rows are dealt to ranks.

A matrix product with a parameter costs 2 FLOPs a token and parameter; the two products of causal attention
cost 2·(D + Dv)·heads·L²/2 a layer for a row of L tokens (fewer under a sliding window). Norms, softmax and
sampling are left out, as is usual for MFU.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.models.experts import experts_per_token, num_experts
from hybridflow.models.vision import Vision, language_class
from hybridflow.protocol import Workload


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
    """Return the cost of a row in FLOPs of a forward pass, by which rows are dealt to ranks.

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
