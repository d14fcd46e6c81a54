"""Divergences from another model's distributions, a chunk of tokens at a time.

    actor's states [M, H] and head, other's states [M, H'] and head ──head_divergence──► D(π, other) [M], nats
    teacher's states and head ──top_outcomes──► [M, 2k + 1] ──head_divergence──► D of these and the rest

Logits [m, V] exist for one chunk only, and a whole distribution never leaves the process. The backward pass
computes them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridflow.algorithms.divergence import REVERSE_KL, divergence, divergence_gradient
from hybridflow.distributed.accelerators import features
from hybridflow.models.heads.joined_head import LOWEST
from hybridflow.models.heads.log_probs import LogitTransform, chunk_tokens


@dataclass(frozen=True)
class DivergenceSpec:
    """Which divergence of the student from a teacher is computed."""

    kind: str = REVERSE_KL
    """forward_kl, reverse_kl or jsd."""
    beta: float = 0.5
    """The teacher's part of the mixture that jsd compares with."""
    renormalize: bool = False
    """Of a teacher's most likely tokens: whether both distributions are those among these tokens alone. If
    not, all other tokens together are one further outcome.
    """


class HeadInputs(NamedTuple):
    """All that the distributions of M predicted tokens follow from."""

    states: Tensor
    """Last hidden states [M, H]."""
    weight: Tensor
    """The head's weight [V, H]."""
    bias: Tensor | None
    """The head's bias [V]."""
    transform: LogitTransform

    def log_probs(self, part: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Return logits before the temperature, and log-probs, each [m, V] float32 or better."""
        logits = self.transform(linear(self.states[part], self.weight, self.bias))
        return logits, torch.log_softmax(logits / temperature, dim=-1).clamp_(min=LOWEST)

    def chunk(self, chunk_bytes: int | None) -> int:
        """Return the tokens of a chunk of `chunk_bytes` of logits, by default the device's."""
        chunk_bytes = chunk_bytes or features(self.states.device.type).logits_bytes
        return chunk_tokens(self.weight.shape[0], self.states.dtype, chunk_bytes)


def full_kl(
    actor: HeadInputs, reference: HeadInputs, temperature: float, chunk_bytes: int | None = None
) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π(v)·(log π(v) − log π_ref(v)) of each token, [M] float32 or better, nats.

    Both distributions are softmax(z / temperature). Gradients flow to the actor's states and head: with
    respect to z they are π·(log π − log π_ref − KL) / temperature.
    """
    return head_divergence(actor, reference, DivergenceSpec(REVERSE_KL), temperature, chunk_bytes)


def head_divergence(
    actor: HeadInputs,
    teacher: HeadInputs | Tensor,
    spec: DivergenceSpec,
    temperature: float,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Return the divergence of the actor from the teacher at each token, [M] float32 or better, nats.

    A teacher is its states and head, for a divergence over the whole vocabulary, or what `top_outcomes` has
    told of it, [M, 2k + 1]. Distributions are softmax(z / temperature). Gradients flow to the actor's states
    and head.
    """
    of_teacher: tuple[Any, ...] = (teacher, None, None, None)
    if isinstance(teacher, HeadInputs):
        of_teacher = teacher
    value: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        actor.states,
        actor.weight,
        actor.bias,
        actor.transform,
        *of_teacher,
        spec,
        temperature,
        actor.chunk(chunk_bytes),
    )
    return value


@torch.no_grad()
def top_outcomes(
    teacher: HeadInputs, k: int, vocabulary: int, temperature: float, chunk_bytes: int | None = None
) -> Tensor:
    """Return the k most likely tokens below `vocabulary` with their log-probs, [M, 2k + 1] float32 or better.

    First the k ids, as numbers, which float32 holds exactly below 2²⁴; then the k log-probs, nats; last the
    log-prob of all other tokens together, of `LOWEST` or more.
    """
    parts = []
    size = teacher.chunk(chunk_bytes)
    for start in range(0, len(teacher.states), size):
        _, log_q = teacher.log_probs(slice(start, start + size), temperature)
        top, ids = log_q[:, :vocabulary].topk(k)
        parts.append(torch.cat([ids.to(top.dtype), top, _rest_(log_q, ids)], dim=-1))
    kind = torch.promote_types(teacher.states.dtype, torch.float32)
    return torch.cat(parts or [teacher.states.new_zeros((0, 2 * k + 1), dtype=kind)])


def _rest_(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of all tokens but `ids` together, [m, 1]; log_p [m, V] is -inf at `ids` then.

    It is summed over these tokens, since 1 less the sum of the others has no digits where little is left.
    """
    return log_p.scatter_(-1, ids, -torch.inf).logsumexp(-1, keepdim=True).clamp_(min=LOWEST)


def _outcomes_(
    log_p: Tensor, log_q: Tensor, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return a student's and a teacher's log-probs [m, K] of outcomes, the ids [m, k], and where the rest
    counts its log-prob [m, 1].

    log_p is [m, V], and -inf at the ids afterwards if the rest counts; log_q [m, 2k + 1] is the teacher's
    `top_outcomes`.
    """
    k = log_q.shape[1] // 2
    ids = log_q[:, :k].long()
    named = log_p.gather(-1, ids)
    theirs = log_q[:, k:].to(log_p.dtype)
    if renormalize:
        return named.log_softmax(-1), theirs[:, :k].log_softmax(-1), ids, None
    rest = _rest_(log_p, ids)
    return torch.cat([named, rest], dim=-1), theirs, ids, rest


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        told: Tensor,
        their_weight: Tensor | None,
        their_bias: Tensor | None,
        their_transform: LogitTransform | None,
        spec: DivergenceSpec,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        actor = HeadInputs(states, weight, bias, transform)
        value = torch.empty(
            len(states), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device
        )
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            _, log_p = actor.log_probs(part, temperature)
            if their_weight is None or their_transform is None:
                log_p, log_q, _, _ = _outcomes_(log_p, told[part], spec.renormalize)
            else:
                teacher = HeadInputs(told, their_weight, their_bias, their_transform)
                _, log_q = teacher.log_probs(part, temperature)
            value[part] = divergence(log_p, log_q, spec.kind, spec.beta)
        ctx.save_for_backward(states, weight, bias, told, their_weight, their_bias)
        ctx.settings = (transform, their_transform, spec, temperature, chunk)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, told, their_weight, their_bias = ctx.saved_tensors
        transform, their_transform, spec, temperature, chunk = ctx.settings
        actor = HeadInputs(states, weight, bias, transform)
        kind = grads[0].dtype
        of_states = torch.empty_like(states)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        of_weight = torch.zeros(weight.shape, dtype=kind, device=weight.device) if wants_weight else None
        of_bias = torch.zeros(weight.shape[:1], dtype=kind, device=weight.device) if wants_bias else None
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            logits, log_p = actor.log_probs(part, temperature)
            if their_weight is None:
                grad = _gradient_of_outcomes(log_p, told[part], spec)
            else:
                teacher = HeadInputs(told, their_weight, their_bias, their_transform)
                _, log_q = teacher.log_probs(part, temperature)
                grad = divergence_gradient(log_p, log_q, spec.kind, spec.beta)
            grad = grad * grads[0][part, None]
            if transform.softcap is not None:
                grad = grad * (1 - (logits / transform.softcap).square())
            grad = grad * (transform.scale / temperature)
            narrow = grad.to(states.dtype)
            of_states[part] = narrow @ weight
            if of_weight is not None:
                of_weight += narrow.T @ states[part]
            if of_bias is not None:
                of_bias += grad.sum(0)
        return (
            of_states,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
            *(None,) * 8,
        )


def _gradient_of_outcomes(log_p: Tensor, told: Tensor, spec: DivergenceSpec) -> Tensor:
    """Return the gradient [m, V] by the logits of log_p [m, V], where the teacher told its top outcomes.

    A named token has that of its outcome; the tokens of the rest share theirs by their probabilities.
    """
    ours, theirs, ids, rest = _outcomes_(log_p, told, spec.renormalize)
    of_outcomes = divergence_gradient(ours, theirs, spec.kind, spec.beta)
    if rest is None:
        return torch.zeros_like(log_p).scatter_(-1, ids, of_outcomes)
    shared = (log_p - rest).exp_().mul_(of_outcomes[:, -1:])
    return shared.scatter_(-1, ids, of_outcomes[:, :-1])
