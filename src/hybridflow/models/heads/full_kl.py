"""The exact KL divergence from a reference over the whole vocabulary, a chunk of tokens at a time.

    actor's states [M, H] and head, reference's states [M, H'] and head ──full_kl──► KL(π ‖ π_ref) [M], nats

Neither distribution leaves the process, and logits [m, V] of both exist for one chunk only. The backward pass
computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridflow.distributed.accelerators import features
from hybridflow.models.heads.joined_head import LOWEST
from hybridflow.models.heads.log_probs import LogitTransform, chunk_tokens


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


def full_kl(
    actor: HeadInputs, reference: HeadInputs, temperature: float, chunk_bytes: int | None = None
) -> Tensor:
    """KL(π ‖ π_ref) = Σ_v π(v)·(log π(v) − log π_ref(v)) of each token, [M] float32 or better, nats.

    Both distributions are softmax(z / temperature). Gradients flow to the actor's states and head: with
    respect to z they are π·(log π − log π_ref − KL) / temperature.
    """
    chunk_bytes = chunk_bytes or features(actor.states.device.type).logits_bytes
    chunk = chunk_tokens(actor.weight.shape[0], actor.states.dtype, chunk_bytes)
    kl: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        actor.states, actor.weight, actor.bias, actor.transform, reference, temperature, chunk
    )
    return kl


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        reference: HeadInputs,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        actor = HeadInputs(states, weight, bias, transform)
        kl = torch.empty(
            len(states), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device
        )
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            _, log_p = actor.log_probs(part, temperature)
            _, log_q = reference.log_probs(part, temperature)
            kl[part] = (log_p.exp() * (log_p - log_q)).sum(-1)
        ctx.save_for_backward(states, weight, bias, reference.states, reference.weight, reference.bias, kl)
        ctx.settings = (transform, reference.transform, temperature, chunk)
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, ref_states, ref_weight, ref_bias, kl = ctx.saved_tensors
        transform, ref_transform, temperature, chunk = ctx.settings
        actor = HeadInputs(states, weight, bias, transform)
        reference = HeadInputs(ref_states, ref_weight, ref_bias, ref_transform)
        of_states = torch.empty_like(states)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        of_weight = torch.zeros(weight.shape, dtype=kl.dtype, device=kl.device) if wants_weight else None
        of_bias = torch.zeros(weight.shape[:1], dtype=kl.dtype, device=kl.device) if wants_bias else None
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            logits, log_p = actor.log_probs(part, temperature)
            _, log_q = reference.log_probs(part, temperature)
            grad = log_p.exp() * (log_p - log_q - kl[part, None]) * grads[0][part, None]
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
            *(None,) * 4,
        )
