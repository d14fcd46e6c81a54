"""Log-probs from an output head whose rows are cut among the ranks of tensor parallelism.

    logits [M, V/tp] of each rank ──largest, sums over ranks──► log-probs, entropies, Σπ² [M] on all ranks

Whole logits are on no rank, and those of a rank a chunk of tokens at a time; the backward pass computes them
again. The formulas are those of `models/heads/log_probs.py`, which serves a head that is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.accelerators import features
from hybridflow.models.heads.log_probs import TokenOutputs, chunk_tokens
from hybridflow.models.output_spec import OutputSpec


@dataclass(frozen=True)
class HeadCut:
    """The rows of the output head that this rank holds."""

    group: dist.ProcessGroup
    """The ranks that hold the others."""
    first: int
    """The token of the first row."""
    count: int
    """Number of rows of tokens; later ones only pad the head."""


def parallel_log_probs(
    states: Tensor, weight: Tensor, targets: Tensor, spec: OutputSpec, cut: HeadCut
) -> TokenOutputs:
    """Return what `spec` asks of each target.

    States [M, H] and targets [M] are equal on all ranks; weight [rows, H] is this rank's part of the head.
    Log-probs and entropies [M] in nats, float32 or better; gradients of the states are summed over ranks.
    """
    log_probs, entropy, squares = _ParallelLogProbs.apply(states, weight, targets, spec.temperature, cut)  # type: ignore[no-untyped-call]
    return TokenOutputs(
        log_probs, entropy if spec.entropy else None, squares if spec.sum_pi_squared else None
    )


class _ParallelLogProbs(torch.autograd.Function):
    """d logp_t/dz_v = [v = t] − p_v and d H/dz_v = −p_v (log p_v + H), for this rank's tokens v."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, temperature: float, cut: HeadCut
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunk = chunk_tokens(len(weight), states.dtype, features(states.device.type).logits_bytes)
        found = [
            _numbers(_logits(part, weight, temperature, cut), wanted, cut)
            for part, wanted in zip(states.split(chunk), targets.split(chunk), strict=True)
        ]
        # [M] each; none predicted leaves tensors of no elements
        kind = torch.promote_types(states.dtype, torch.float32)
        numbers = torch.cat(found, dim=1) if found else torch.empty(4, 0, dtype=kind, device=states.device)
        log_probs, total, entropy, squares = numbers
        ctx.save_for_backward(states, weight, targets, total, entropy)
        ctx.settings = (temperature, cut, chunk)
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, total, entropy = ctx.saved_tensors
        temperature, cut, chunk = ctx.settings
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=total.dtype)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            log_p = _logits(states[part], weight, temperature, cut) - total[part, None]
            p = log_p.exp()
            slope = -grads[0][part, None] * p
            slope -= grads[1][part, None] * p * (_bounded(log_p) + entropy[part, None])
            rows, columns = _own_targets(targets[part], cut)
            slope[rows, columns] += grads[0][part][rows]
            slope = (slope / temperature).to(weight.dtype)
            grad_states[part] = slope @ weight
            grad_weight += slope.T @ states[part]
        dist.all_reduce(grad_states, group=cut.group)
        return grad_states, grad_weight.to(weight.dtype), None, None, None


def _logits(states: Tensor, weight: Tensor, temperature: float, cut: HeadCut) -> Tensor:
    """Return this rank's logits [m, rows], float32 or better, -inf where a row is no token's."""
    logits = (states @ weight.T).to(torch.promote_types(states.dtype, torch.float32)) / temperature
    logits[:, cut.count :] = -float("inf")
    return logits


def _own_targets(targets: Tensor, cut: HeadCut) -> tuple[Tensor, Tensor]:
    """Return the places (row, column) of the targets that are among this rank's tokens."""
    columns = targets - cut.first
    rows = ((columns >= 0) & (columns < cut.count)).nonzero()[:, 0]
    return rows, columns[rows]


def _numbers(logits: Tensor, targets: Tensor, cut: HeadCut) -> Tensor:
    """Return log-prob, log-sum-exp, entropy and Σπ² of each target, [4, m], from the logits of all ranks."""
    largest = logits.amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=cut.group)
    sums = torch.zeros(2, len(targets), dtype=logits.dtype, device=logits.device)
    sums[0] = (logits - largest[:, None]).exp().sum(dim=-1)
    rows, columns = _own_targets(targets, cut)
    sums[1, rows] = logits[rows, columns]
    dist.all_reduce(sums, group=cut.group)
    total = largest + sums[0].log()
    log_p = logits - total[:, None]
    p = log_p.exp()
    more = torch.stack([-(p * _bounded(log_p)).sum(dim=-1), p.square().sum(dim=-1)])
    dist.all_reduce(more, group=cut.group)
    return torch.stack([sums[1] - total, total, *more])


def _bounded(log_p: Tensor) -> Tensor:
    """Return log-probs above -inf, whose product with a probability of 0 is 0."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)
