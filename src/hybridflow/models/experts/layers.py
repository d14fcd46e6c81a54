"""The mixture-of-experts layers of a model: where they are, and by which kernel their experts are computed.

A layer has a router, whose outputs are (logits [N, E], weights [N, K], indices [N, K]), and experts, which
transformers keep as one tensor for all of them: `experts.gate_up_proj [E, 2I, H]`, `experts.down_proj
[E, H, I]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from hybridflow.config.model import NUMBERS_OF_EXPERTS
from hybridflow.models.copies.quantized_weights import QuantizedWeight
from hybridflow.models.exact_mode import ExactMode

EXPERTS_ONE_BY_ONE = "hybridflow_one_by_one"
"""The name of `experts_one_by_one` among the kernels of experts."""
_ROUTERS = ("router", "gate", "gating")
"""Ends of the names that models give to routers or to their classes."""
_LAYER = re.compile(r"\.(\d+)\.")


def num_experts(config: PretrainedConfig) -> int:
    """Return the number of experts of a sparse layer, 0 for a dense model."""
    text = config.get_text_config()
    return next((int(getattr(text, name)) for name in NUMBERS_OF_EXPERTS if getattr(text, name, None)), 0)


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


def is_router(root: nn.Module, path: str) -> bool:
    """Return whether the linear layer at `path` in `root` is a router, or the one in a router."""
    owner, _, leaf = path.rpartition(".")
    names = (leaf, type(root.get_submodule(owner)).__name__)
    return any(name.lower().endswith(_ROUTERS) for name in names)


def expert_modules(hf: nn.Module) -> dict[str, Any]:
    """Return the modules that hold all experts of a layer as one tensor, by name."""
    return {name: module for name, module in hf.named_modules() if hasattr(module, "is_transposed")}


def mlp_width(config: PretrainedConfig) -> int:
    """Return the largest number of activations that the feed-forward part of a layer has for a token."""
    text = config.get_text_config()
    width = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    own = int(getattr(text, "moe_intermediate_size", None) or width)
    shared = int(getattr(text, "shared_expert_intermediate_size", None) or 0)
    shared += own * int(getattr(text, "n_shared_experts", None) or 0)
    return max(width, experts_per_token(config) * own + shared)


class ExactExperts:
    """The switch between a model's own kernel of experts and the one that computes them one by one, for exact
    mode and for quantized weights.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self.hf = hf
        self.usual: str | None = None
        """The kernel outside of exact mode; None for a model that has no choice of one."""
        if num_experts(hf.config) and hf._can_set_experts_implementation():
            ExpertsInterface.register(EXPERTS_ONE_BY_ONE, experts_one_by_one)
            self.usual = hf.config._experts_implementation

    def switch(self, mode: ExactMode | None) -> None:
        """Compute experts as `mode` needs it, or as usual; nothing is done for a dense model."""
        if self.usual is None:
            return
        self.hf.set_experts_implementation(self.usual if mode is None else EXPERTS_ONE_BY_ONE)
        for experts in expert_modules(self.hf).values():
            experts.exact_mode = mode

    def use_quantized(self, quantized: Mapping[str, Mapping[str, Sequence[QuantizedWeight]]]) -> None:
        """Compute experts with quantized weights: by module and parameter, one for each expert."""
        assert self.usual is not None, "a kernel of our own needs a model that lets its kernel be chosen"
        self.usual = EXPERTS_ONE_BY_ONE
        self.hf.set_experts_implementation(EXPERTS_ONE_BY_ONE)
        for name, weights in quantized.items():
            module: Any = self.hf.get_submodule(name)
            module.quantized = weights


def count_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, [E] float64. Unlike for bincount, no host waits."""
    flat = chosen.reshape(-1)
    ones = torch.ones_like(flat, dtype=torch.float64)
    return ones.new_zeros(num_experts).index_add_(0, flat, ones)


def experts_one_by_one(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of hidden states [N, H] one by one: indices and weights [N, K] -> [N, H].

    In exact mode each expert gets its tokens in one product of as many rows as a dense layer gets, so that
    the bits of a token depend on no other. The K products of a token are added up in its experts' order.
    """
    count, chosen = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    sizes = count_choices(flat, experts.num_experts).long().tolist()
    parts = hidden_states[order // chosen].split(sizes)
    mode: ExactMode | None = getattr(experts, "exact_mode", None)
    done = [
        _expert(experts, expert, part if mode is None else mode.pad_rows(part))[: len(part)]
        for expert, part in enumerate(parts)
        if len(part)
    ]
    outputs = torch.cat(done)[order.argsort()].view(count, chosen, -1)
    return (outputs * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _expert(experts: Any, expert: int, states: Tensor) -> Tensor:
    """Return one expert's outputs [n, H] for states [n, H]."""
    hidden = experts._apply_gate(_product(experts, "gate_up_proj", expert, states))
    return _product(experts, "down_proj", expert, hidden)


def _product(experts: Any, name: str, expert: int, states: Tensor) -> Tensor:
    bias = None
    if experts.has_bias:
        bias = getattr(experts, f"{name}_bias")[expert]
    quantized = getattr(experts, "quantized", {}).get(name)
    if quantized is not None:
        product: Tensor = quantized[expert].linear(states, bias)
        return product
    weight = getattr(experts, name)[expert]
    mode: ExactMode | None = getattr(experts, "exact_mode", None)
    compute = linear if mode is None else mode.product
    return compute(states, weight.T if experts.is_transposed else weight, bias)
