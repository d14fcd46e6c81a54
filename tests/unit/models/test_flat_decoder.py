"""Norms and rotations in fewer operations are taken only where they have the model's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, apply_rotary_pos_emb

from hybridflow.models.flat_decoder import _norm_of, _rotates_halves


class OtherNorm(LlamaRMSNorm):
    """Gemma's: a weight of 0 changes nothing."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        normed = hidden_states * torch.rsqrt(
            hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon
        )
        return (1 + weight) * normed


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_norm_is_one_operation_with_the_bits_of_the_module(rows: int) -> None:
    module = LlamaRMSNorm(96)
    norm = _norm_of(module)
    assert norm is not module
    with torch.no_grad():
        module.weight.normal_()
    states = torch.randn(rows, 1, 96)
    assert torch.equal(norm(states), module(states))


def test_a_norm_of_another_formula_stays_the_module() -> None:
    module = OtherNorm(96)
    assert _norm_of(module) is module
    assert torch.equal(module.weight, torch.ones(96)), "the weights of the model are left as they are"


def test_a_rotation_of_another_formula_stays_the_models() -> None:
    attention = nn.Module()
    attention.head_dim = 16
    attention.q_proj = nn.Linear(8, 64)

    def other(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(query, key, cos, -sin)

    assert _rotates_halves(apply_rotary_pos_emb, attention)
    assert not _rotates_halves(other, attention)
    assert LlamaAttention.__module__ == apply_rotary_pos_emb.__module__  # where the decoder looks for it
