"""The mixture-of-experts layers of a model: where they are, and by which kernel their experts are computed.

A layer has a router, whose outputs are (logits [N, E], weights [N, K], indices [N, K]), and experts, which
transformers keep as one tensor for all of them: `experts.gate_up_proj [E, 2I, H]`, `experts.down_proj
[E, H, I]`.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

EXACT_EXPERTS = "batched_mm"
"""The kernel of experts whose bits for a token do not depend on the other tokens of the batch."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYER = re.compile(r"\.(\d+)\.")


def num_experts(config: PretrainedConfig) -> int:
    """Return the number of experts of a sparse layer, 0 for a dense model."""
    text = config.get_text_config()
    return next((int(getattr(text, name)) for name in _COUNTS if getattr(text, name, None)), 0)


def experts_per_token(config: PretrainedConfig) -> int:
    """Return the number of experts that a token is routed to, 0 for a dense model."""
    if not num_experts(config):
        return 0
    return int(getattr(config.get_text_config(), "num_experts_per_tok", None) or num_experts(config))


def routers(hf: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of a model by the number of their decoder layer; dense layers have none."""
    found: dict[int, nn.Module] = {}
    for name, module in hf.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            layer = _LAYER.search(f".{name}.")
            assert layer is not None, f"the router {name} is in no numbered layer"
            found[int(layer[1])] = module
    return found


def mlp_width(config: PretrainedConfig) -> int:
    """Return the largest number of activations that the feed-forward part of a layer has for a token."""
    text = config.get_text_config()
    width = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    own = int(getattr(text, "moe_intermediate_size", None) or width)
    shared = int(getattr(text, "shared_expert_intermediate_size", None) or 0)
    shared += own * int(getattr(text, "n_shared_experts", None) or 0)
    return max(width, experts_per_token(config) * own + shared)


class ExactExperts:
    """The switch between a model's own kernel of experts and the one that exact mode needs."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self.usual: str | None = None
        """The kernel outside of exact mode; None for a model that has no choice of one."""
        if num_experts(hf.config) and hf._can_set_experts_implementation():
            self.usual = hf.config._experts_implementation

    def switch(self, exact: bool) -> None:
        """Compute experts as exact mode needs them, or as usual; nothing is done for a dense model."""
        if self.usual is not None:
            self.hf.set_experts_implementation(EXACT_EXPERTS if exact else self.usual)
