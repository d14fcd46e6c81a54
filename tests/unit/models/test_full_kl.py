"""The KL over the whole vocabulary against sums in float64, with its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import packed_rows, tiny_hf, tiny_rows

from hybridflow.models.heads.full_kl import HeadInputs, full_kl
from hybridflow.models.heads.log_probs import LogitTransform
from hybridflow.models.policy import PolicyModel

TOKENS, WIDTH, VOCABULARY = 11, 6, 9


def inputs(seed: int, dtype: torch.dtype, softcap: float | None, width: int = WIDTH) -> HeadInputs:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, width), (VOCABULARY, width), (VOCABULARY,))
    states, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return HeadInputs(states, weight, bias, LogitTransform(0.7, softcap))


def slow(one: HeadInputs, other: HeadInputs, temperature: float) -> Tensor:
    """The sum over the vocabulary, by its definition."""
    both = []
    for each in (one, other):
        logits = 0.7 * (each.states.double() @ each.weight.double().T + each.bias.double())  # type: ignore[union-attr]
        if each.transform.softcap is not None:
            logits = each.transform.softcap * torch.tanh(logits / each.transform.softcap)
        both.append((logits / temperature).softmax(-1))
    p, q = both
    return (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 300, 10**6])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients(softcap: float | None, chunk: int, dtype: torch.dtype, bound: float) -> None:
    actor, reference = inputs(0, dtype, softcap), inputs(1, dtype, softcap, width=4)
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    found = []
    for function in (lambda *args: full_kl(*args, chunk_bytes=chunk), slow):
        parts = [x.clone().requires_grad_() for x in actor[:3]]  # type: ignore[union-attr]
        kl = function(HeadInputs(*parts, actor.transform), reference, 0.8)
        found.append([kl.detach(), *torch.autograd.grad((kl.double() * weights).sum(), parts)])
    assert (found[1][0] > 0).all()
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got.double(), want.double(), atol=bound, rtol=bound)


def test_it_is_zero_against_itself_and_has_no_gradient() -> None:
    actor = inputs(0, torch.float64, None)
    states = actor.states.clone().requires_grad_()
    kl = full_kl(actor._replace(states=states), actor, 1.0)
    assert kl.abs().max() < 1e-14 and torch.autograd.grad(kl.sum(), states)[0].abs().max() < 1e-14


def test_a_token_without_probability_adds_nothing() -> None:
    actor = inputs(0, torch.float32, None)
    bias = actor.bias.clone()  # type: ignore[union-attr]
    bias[3] = float("-inf")
    states = actor.states.clone().requires_grad_()
    kl = full_kl(actor._replace(states=states, bias=bias), inputs(1, torch.float32, None), 1.0)
    kl.sum().backward()
    assert kl.isfinite().all() and states.grad is not None and states.grad.isfinite().all()


def test_of_a_model_at_the_tokens_that_it_predicts() -> None:
    actor = PolicyModel(tiny_hf("qwen2", torch.float64))
    other = PolicyModel(tiny_hf("llama", torch.float64, seed=5))
    packed = packed_rows(tiny_rows())
    actor.reference = other.head_inputs
    outputs = actor(packed, temperature=0.8, with_full_kl=True)
    assert outputs.full_kl.requires_grad
    found = []
    for model in (actor, other):
        model.hf.set_attn_implementation("eager")
        rows = packed.input_ids.split(packed.lengths)
        with torch.no_grad():
            logits = torch.cat([model.hf(input_ids=row[None]).logits[0] for row in rows])
        found.append((logits[packed.predict_index] / 0.8).log_softmax(-1))
    p, q = found
    assert torch.allclose(outputs.full_kl, (p.exp() * (p - q)).sum(-1), atol=1e-9)
    assert all(parameter.grad is None for parameter in other.parameters())
