"""Norms and gated layers that keep less: their bits, what they keep, and which layers are computed so."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP, Qwen3RMSNorm

from hybridflow.models import lean_backward
from hybridflow.models.norms import join_norms

HIDDEN = 24
WIDE = 40
TOKENS = 9


class Residual(nn.Module):
    """The second half of a block: a norm, a gated layer and the stream beside them."""

    def __init__(self, norm: nn.Module, gated: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gated = gated

    def forward(self, states: Tensor) -> Tensor:
        """states [1, N, H] to states of the same shape."""
        out: Tensor = states + self.gated(self.norm(states))
        return out


def _blocks(kind: str) -> tuple[Residual, Residual]:
    """Return a block of transformers' own layers with random weights, and a lean copy of it."""
    torch.manual_seed(0)
    if kind == "llama":
        plain = Residual(LlamaRMSNorm(HIDDEN), LlamaMLP(_config(LlamaConfig)))
    else:
        plain = Residual(Qwen3RMSNorm(HIDDEN), Qwen3MLP(_config(Qwen3Config)))
    nn.init.normal_(plain.norm.weight)
    lean = deepcopy(plain)
    join_norms(lean)
    lean_backward.keep_gates_lean(lean)
    lean_backward.keep_gates_lean(lean)
    return plain, lean


def _config(kind: Any, **others: Any) -> Any:
    return kind(hidden_size=HIDDEN, intermediate_size=WIDE, num_attention_heads=4, **others)


def _trained(block: nn.Module) -> tuple[list[Tensor], int]:
    """Return outputs and gradients of a pass, and the numbers that it has kept for the backward pass."""
    states = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(states)
    numbers = sum(tensor.numel() for tensor in kept.values())
    gradients = torch.autograd.grad(out.square().sum(), [states, *block.parameters()])
    return [out, *gradients], numbers


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_outputs_and_gradients_keep_their_bits(kind: str) -> None:
    plain, lean = _blocks(kind)
    wanted, _ = _trained(plain)
    found, _ = _trained(lean)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_block_keeps_states_roots_normed_states_and_two_wide_tensors() -> None:
    plain, lean = _blocks("llama")
    _, before = _trained(plain)
    _, after = _trained(lean)
    assert after == TOKENS * (2 * HIDDEN + 1 + 2 * WIDE)
    assert before - after == TOKENS * (HIDDEN + 2 * WIDE)  # states / root, silu(gate), silu(gate) · up


def test_frozen_weights_get_no_gradient_and_states_the_same() -> None:
    found = []
    for block in _blocks("llama"):
        states = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        block.requires_grad_(False)
        block(states).square().sum().backward()
        assert all(parameter.grad is None for parameter in block.parameters())
        found.append(states.grad)
    assert torch.equal(*found)


def test_a_lean_layer_can_be_copied_and_pickled() -> None:
    _, lean = _blocks("llama")
    wanted, numbers = _trained(lean)
    for again in (deepcopy(lean), pickle.loads(pickle.dumps(lean.gated))):
        gated = getattr(again, "gated", again)
        assert isinstance(gated, lean_backward.LeanGatedLayer)
        found, kept = _trained(Residual(lean.norm, gated))
        assert kept == numbers
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class SquaredMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def test_a_layer_of_another_form_or_activation_stays() -> None:
    gelu = GemmaMLP(_config(GemmaConfig, hidden_activation="gelu_pytorch_tanh"))
    squared = SquaredMLP(_config(LlamaConfig))
    for layer in (gelu, squared):
        lean_backward.keep_gates_lean(layer)
        assert not isinstance(layer, lean_backward.LeanGatedLayer)


def test_a_projection_with_a_hook_a_bias_or_another_class_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    _, lean = _blocks("llama")
    layer: Any = lean.gated
    states = torch.randn(1, TOKENS, HIDDEN)
    wanted = layer(states)
    calls = []
    hook = layer.down_proj.register_forward_hook(lambda *told: calls.append(told))
    assert torch.equal(layer(states), wanted) and len(calls) == 1
    hook.remove()
    layer.down_proj.bias = nn.Parameter(torch.ones(HIDDEN))
    assert torch.allclose(layer(states), wanted + 1, atol=1e-6)
    doubled = Doubled(WIDE, HIDDEN, bias=False)
    doubled.weight = layer.down_proj.weight
    layer.down_proj = doubled
    assert torch.equal(layer(states), wanted * 2)
