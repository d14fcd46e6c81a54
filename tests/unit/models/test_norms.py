"""Norms of one operation: which classes become such, and that a model on a CPU keeps its bits."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hybridflow.models import norms


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_plain_norm_is_joined_and_keeps_its_bits_on_a_cpu(kind: type[nn.Module]) -> None:
    norm = kind(12, eps=1e-5)
    nn.init.normal_(norm.weight)
    states = torch.randn(3, 12)
    wanted = norm(states)
    block = nn.Sequential(norm)
    norms.join_norms(block)
    norms.join_norms(block)
    assert isinstance(norm, norms.JoinedNorm) and isinstance(norm, kind)
    assert type(norm).__name__ == kind.__name__ and type(norm).mro().count(norms.JoinedNorm) == 1
    assert torch.equal(norm(states), wanted)
    copied = deepcopy(norm)
    with torch.no_grad():
        norm.weight.zero_()
    assert torch.equal(copied(states), wanted)


def test_a_model_may_be_made_on_the_meta_device() -> None:
    class FirstRMSNorm(LlamaRMSNorm):
        """A class that was not looked at before."""

    with torch.device("meta"):
        norm = FirstRMSNorm(12)
        norms.join_norms(norm)
    assert isinstance(norm, norms.JoinedNorm) and norm.weight.is_meta


class ResidualRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states)


class ClampingRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-100, 100))


class PickyRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        assert hidden_states.dim() == 3
        return super().forward(hidden_states)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, ResidualRMSNorm, ClampingRMSNorm, PickyRMSNorm])
def test_a_norm_of_another_form_stays(kind: type[nn.Module]) -> None:
    norm = kind(12)
    norms.join_norms(norm)
    assert type(norm) is kind


def test_a_joined_norm_can_be_pickled() -> None:
    norm = LlamaRMSNorm(12)
    nn.init.normal_(norm.weight)
    norms.join_norms(norm)
    again = pickle.loads(pickle.dumps(norm))
    states = torch.randn(3, 12)
    assert type(again) is type(norm) and torch.equal(again(states), norm(states))


def test_elsewhere_it_is_one_operation_of_states_of_the_weights_dtype() -> None:
    norm = LlamaRMSNorm(12, eps=1e-5).to("meta")
    norms.join_norms(norm)
    names = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    states = torch.randn(3, 12, device="meta")
    with Seen():
        assert norm(states).shape == (3, 12)
        assert rms_norm.__name__ in names
        names.clear()
        norm(states.bfloat16())
    assert rms_norm.__name__ not in names
