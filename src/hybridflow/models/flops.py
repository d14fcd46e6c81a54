"""The arithmetic of a batch in FLOPs, for throughput in FLOP/s and for MFU.

A matrix product with a parameter costs 2 FLOPs a token and parameter; the two products of causal attention
cost 2·(D + Dv)·heads·L²/2 a layer for a row of L tokens (fewer under a sliding window). A backward pass costs
twice the forward. Norms, softmax, sampling and the recomputation of gradient checkpointing are left out, as
is usual for MFU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.protocol import Workload

# Dense bfloat16 peaks in FLOP/s, from the vendors' data sheets (SXM parts where there are several).
_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12, "B200": 2250e12}
_PEAKS |= {
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "4090": 165e12,
}
_PEAKS |= {"MI300X": 1307e12}


def matmul_parameters(hf: PreTrainedModel) -> int:
    """Return the number of parameters that a token is multiplied with.

    The input embedding does not count, and of experts only those that a token is routed to.
    """
    config = hf.config.get_text_config()
    table = hf.get_input_embeddings().weight
    head = hf.get_output_embeddings()
    share = _expert_share(config)
    total = 0.0
    for name, parameter in hf.named_parameters():
        if parameter is table:
            continue
        if ".experts." in name:
            total += parameter.numel() * share
        else:
            total += parameter.numel()
    if head is not None and head.weight is table:  # tied: the head's product is real
        total += table.numel()
    return int(total)


def forward_flops(config: PretrainedConfig, num_parameters: int, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a forward pass over such rows; `num_parameters` is `matmul_parameters`."""
    text = config.get_text_config()
    attended: float = sum(_attended_pairs(length, window) for window in _windows(text) for length in lengths)
    return float(2 * num_parameters * sum(lengths) + 2 * _attention_width(text) * attended)


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


def training_flops(config: PretrainedConfig, num_parameters: int, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a forward and backward pass over rows of these lengths."""
    return 3.0 * forward_flops(config, num_parameters, lengths)


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in FLOP/s; None on CPU and for an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


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


def _attended_pairs(length: int, window: int | None) -> float:
    """Return the query-key pairs of a causal row: L²/2, or fewer inside a window."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


def _expert_share(config: PretrainedConfig) -> float:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if total and chosen:
        return float(chosen) / float(total)
    return 1.0
