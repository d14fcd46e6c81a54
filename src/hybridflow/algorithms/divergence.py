"""Divergences of a student's distributions from a teacher's, and their gradients by the student's logits.

The generalised Jensen–Shannon divergence is that of GKD, Agarwal et al., 2306.13649, section 2.
"""

from __future__ import annotations

import math

from torch import Tensor

FORWARD_KL = "forward_kl"
REVERSE_KL = "reverse_kl"
JSD = "jsd"


def divergence(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """forward_kl: KL(q ‖ p); reverse_kl: KL(p ‖ q); jsd: β·KL(q ‖ m) + (1 − β)·KL(p ‖ m), m = β·q + (1−β)·p.

    log_p of the student and log_q of the teacher [M, K] float, nats, are finite and each sum to 1 in
    probabilities; the divergence of each token is [M], nats. As β goes to 0, jsd / β goes to the forward KL,
    and as β goes to 1, jsd / (1 − β) to the reverse KL.
    """
    if kind == FORWARD_KL:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if kind == REVERSE_KL:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = _log_mixture(log_p, log_q, beta)
    of_teacher = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * of_teacher + (1 - beta) * (log_p.exp() * (log_p - log_m)).sum(-1)


def divergence_gradient(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Return ∂D/∂z [M, K] of `divergence` for logits z with p = softmax(z).

    forward_kl: p − q; reverse_kl: p·(log p − log q − KL(p ‖ q)); jsd: (1 − β)·p·(log p − log m − KL(p ‖ m)).
    """
    p = log_p.exp()
    if kind == FORWARD_KL:
        return p - log_q.exp()
    other = log_q
    if kind == JSD:
        other = _log_mixture(log_p, log_q, beta)
    gradient = p * (log_p - other - (p * (log_p - other)).sum(-1)[:, None])
    if kind == JSD:
        gradient = gradient * (1 - beta)
    return gradient


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return (log_q + math.log(beta)).logaddexp(log_p + math.log1p(-beta))
