"""A description of what a loaded model computes with, for the log of a run and for `config --explain`."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from hybridflow.models.experts import num_experts
from hybridflow.models.rope import describe_rope, length_limit, longest_generated

_USUAL_EXPERTS = "grouped_mm"


def in_force(config: PretrainedConfig, dtype: torch.dtype) -> str:
    """Return attention, rotary settings, positions, dtype and experts that a model of `config` has here."""
    text = config.get_text_config()
    parts = ["attention over packed rows by PyTorch's kernels"]
    windows = (getattr(text, "layer_types", None) or []).count("sliding_attention")
    if windows and getattr(text, "sliding_window", None):
        parts[0] += f", in {windows} of {text.num_hidden_layers} layers over {text.sliding_window} tokens"
    parts.append(f"rope {describe_rope(config)}")
    longest = longest_generated(config)
    if longest is not None:
        parts.append(f"rows of up to {longest} tokens are generated")
    limit = length_limit(config)
    if limit is not None:
        parts.append(f"longer rows than {limit} tokens have rotary frequencies of their own")
    parts.append(f"dtype {str(dtype).removeprefix('torch.')}")
    if num_experts(config):
        parts.append(f"experts by {getattr(text, '_experts_implementation', None) or _USUAL_EXPERTS}")
    return "; ".join(parts)
