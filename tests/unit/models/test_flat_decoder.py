"""Decoding without module calls: the same states to the bit, and used only where that has been seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import SUPPORTED, VOCABULARY, tiny_hf

from hybridflow.models.kv_cache import SlotCache
from hybridflow.models.policy import PolicyModel
from hybridflow.models.probe import layer_facts
from hybridflow.models.span_layout import SpanLayout

FLAT = {"llama", "qwen2", "qwen3", "mistral"}
SHAPED_ALIKE = {"granite": {"residual_multiplier": 0.7}}
"""The same modules, used otherwise."""


def decoded(policy: PolicyModel, how: str, steps: int = 7) -> list[Tensor]:
    """States [B, 1, H] of some steps of three rows of different lengths, by `policy.hidden` or
    `policy.decode`.
    """
    cache, draw = SlotCache(layer_facts(policy)[0], 3, 16), torch.Generator().manual_seed(3)
    for stored in (*cache.keys.values(), *cache.values.values()):
        stored.normal_(generator=draw)
    lengths, states = torch.tensor([2, 6, 0]), []
    for step in range(steps):
        tokens = torch.randint(3, VOCABULARY, (3, 1), generator=draw)
        with torch.no_grad():
            states.append(
                getattr(policy, how)(tokens, lengths[:, None], SpanLayout.decoding(cache, lengths, 6 + step))
            )
        lengths = lengths + 1
    return states


@pytest.mark.parametrize("kind", sorted(FLAT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_shaped_models_decode_flat_and_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    policy = PolicyModel(tiny_hf(kind, dtype))
    expected = decoded(policy, "hidden")
    for _ in range(2):  # the first step of the first time is compared, the others are flat
        assert all(map(torch.equal, decoded(policy, "decode"), expected))
    assert policy._flat is not None


@pytest.mark.parametrize("kind", sorted(set(SUPPORTED) - FLAT))
def test_every_other_model_decodes_by_its_modules(kind: str) -> None:
    policy = PolicyModel(tiny_hf(kind, **SHAPED_ALIKE.get(kind, {})))
    assert all(map(torch.equal, decoded(policy, "decode"), decoded(policy, "hidden")))
    assert policy._flat is None


def test_weights_and_layers_may_be_exchanged_after_it_was_made() -> None:
    policy = PolicyModel(tiny_hf("qwen2"))
    decoded(policy, "decode")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    layer = policy.hf.base_model.layers[0].self_attn
    layer.q_proj = torch.nn.Sequential(layer.q_proj, torch.nn.Tanh())  # as adapters stand around a layer
    assert all(map(torch.equal, decoded(policy, "decode"), decoded(policy, "hidden")))
