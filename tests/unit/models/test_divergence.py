"""The KL and other divergences over the vocabulary against sums in float64, with their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from zoo import packed_rows, tiny_hf, tiny_rows

from hybridflow.models.heads.divergence import (
    DivergenceSpec,
    HeadInputs,
    full_kl,
    head_divergence,
    top_outcomes,
)
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


SPECS = [
    DivergenceSpec(kind, beta, renormalize)
    for kind, beta in (("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3))
    for renormalize in (False, True)
]


def by_autograd(
    actor: HeadInputs, teacher: HeadInputs, spec: DivergenceSpec, k: int | None, below: int
) -> Tensor:
    """The divergence with all logits at once; of a teacher's k tokens by plain sums over the outcomes."""
    p, q = (each.log_probs(slice(None), 0.8)[1].exp() for each in (actor, teacher))
    if k is not None:
        ids = q[:, :below].topk(k).indices
        p, q = (
            torch.cat([x.gather(-1, ids), (1 - x.gather(-1, ids).sum(-1, keepdim=True))], -1) for x in (p, q)
        )
        if spec.renormalize:
            p, q = (x[:, :-1] / x[:, :-1].sum(-1, keepdim=True) for x in (p, q))
    if spec.kind == "forward_kl":
        return (q * (q / p).log()).sum(-1)
    if spec.kind == "reverse_kl":
        return (p * (p / q).log()).sum(-1)
    m = spec.beta * q + (1 - spec.beta) * p
    return spec.beta * (q * (q / m).log()).sum(-1) + (1 - spec.beta) * (p * (p / m).log()).sum(-1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("k", [None, 1, 3, 7])
@pytest.mark.parametrize("chunk", [300, 10**6])
def test_a_teacher_whole_or_by_its_most_likely_tokens(
    spec: DivergenceSpec, k: int | None, chunk: int
) -> None:
    actor, teacher = inputs(0, torch.float64, 1.5), inputs(1, torch.float64, None, width=4)
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    told: HeadInputs | Tensor = teacher
    if k is not None:
        told = top_outcomes(teacher, k, VOCABULARY - 1, 0.8, chunk)
        assert told.shape == (TOKENS, 2 * k + 1) and int(told[:, :k].max()) < VOCABULARY - 1
    found = []
    for slow_way in (False, True):
        parts = [x.clone().requires_grad_() for x in actor[:3]]  # type: ignore[union-attr]
        student = HeadInputs(*parts, actor.transform)
        if slow_way:
            logits = actor.transform(parts[0] @ parts[1].T + parts[2])
            student = _Given(logits)  # type: ignore[assignment]
            value = by_autograd(student, teacher, spec, k, VOCABULARY - 1)
        else:
            value = head_divergence(student, told, spec, 0.8, chunk)
        grads = torch.autograd.grad((value * weights).sum(), parts, allow_unused=k == 1 and spec.renormalize)
        found.append([value.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)])
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, atol=1e-11, rtol=1e-9)


class _Given:
    """A student whose logits are given, for plain autograd."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def log_probs(self, part: slice, temperature: float) -> tuple[Tensor, Tensor]:
        return self.logits, torch.log_softmax(self.logits / temperature, dim=-1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_all_tokens_as_the_most_likely_ones_are_the_whole_vocabulary(spec: DivergenceSpec) -> None:
    actor, teacher = inputs(0, torch.float64, None), inputs(1, torch.float64, None)
    found = []
    for told in (teacher, top_outcomes(teacher, VOCABULARY, VOCABULARY, 1.0)):
        states = actor.states.clone().requires_grad_()
        value = head_divergence(actor._replace(states=states), told, spec, 1.0)
        found.append((value.detach(), torch.autograd.grad(value.sum(), states)[0]))
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, atol=1e-12)


def test_little_that_is_left_keeps_its_digits() -> None:
    teacher = inputs(1, torch.float32, None)
    bias = torch.full_like(teacher.bias, -30.0)  # type: ignore[arg-type]
    bias[2] = 0.0
    sharp = teacher._replace(bias=bias, states=teacher.states * 0.01)
    told = top_outcomes(sharp, 1, VOCABULARY, 1.0)
    exact = sharp._replace(
        states=sharp.states.double(), weight=sharp.weight.double(), bias=bias.double()
    ).log_probs(slice(None), 1.0)[1]
    exact[:, 2] = -torch.inf
    assert bool((told[:, 0] == 2).all())
    assert torch.allclose(told[:, -1].double(), exact.logsumexp(-1), rtol=1e-5)
    assert float(told[:, -1].max()) < -18, "1 less a float32 near 1 could not tell it"


def test_a_teacher_of_a_model_beside_it_or_by_what_it_told() -> None:
    actor = PolicyModel(tiny_hf("qwen2", torch.float64))
    other = PolicyModel(tiny_hf("llama", torch.float64, seed=5))
    packed = packed_rows(tiny_rows())
    vocabulary = actor.head.weight.shape[0]
    told = other(packed, temperature=0.8, top=(vocabulary, vocabulary)).top_outcomes
    spec = DivergenceSpec("forward_kl")
    by_told = actor(replace(packed, top_outcomes=told), temperature=0.8, divergence=spec).divergence
    actor.teacher = other.head_inputs
    beside = actor(packed, temperature=0.8, divergence=spec).divergence
    assert beside.requires_grad and torch.allclose(by_told, beside, atol=1e-10)
    assert all(parameter.grad is None for parameter in other.parameters())
