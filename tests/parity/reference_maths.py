"""Slow references in float64: the formulas of the papers as plain loops over Python floats, written apart
from the library.

Only log-probs and values are torch scalars, so that gradients can be asked for; a mask is a list of lists of
bools.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Rows = list[list[float]]
Mask = list[list[bool]]


def whiten(x: Rows, mask: Mask) -> Rows:
    kept = [v for xs, ms in zip(x, mask, strict=True) for v, m in zip(xs, ms, strict=True) if m]
    if not kept:
        return [[0.0] * len(xs) for xs in x]
    mean = math.fsum(kept) / len(kept)
    var = math.fsum((v - mean) ** 2 for v in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    return [
        [(v - mean) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(xs, ms, strict=True)]
        for xs, ms in zip(x, mask, strict=True)
    ]


def gae(rewards: Rows, values: Rows, mask: Mask, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Each row's sampled tokens as a sequence of their own; the sum over k of (γλ)^k δ, not the recursion."""
    advantages = [[0.0] * len(row) for row in rewards]
    returns = [[0.0] * len(row) for row in rewards]
    for i, ms in enumerate(mask):
        steps = [t for t, m in enumerate(ms) if m]
        r, v = [rewards[i][t] for t in steps], [values[i][t] for t in steps] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(steps))]
        for k, t in enumerate(steps):
            advantages[i][t] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(steps)))
            returns[i][t] = advantages[i][t] + v[k]
    return advantages, returns


def grpo(rewards: Rows, mask: Mask, groups: list[int], norm_by_std: bool) -> Rows:
    scores = [
        math.fsum(r for r, m in zip(rs, ms, strict=True) if m) for rs, ms in zip(rewards, mask, strict=True)
    ]
    out = []
    for i, ms in enumerate(mask):
        members = [scores[j] for j in range(len(scores)) if groups[j] == groups[i] and any(mask[j])]
        if not any(ms) or max(members) == min(members):
            out.append([0.0] * len(ms))
            continue
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((s - mean) ** 2 for s in members) / (len(members) - 1))
        advantage = (scores[i] - mean) / (std + 1e-6) if norm_by_std else scores[i] - mean
        out.append([advantage if m else 0.0 for m in ms])
    return out


def aggregate(token: Callable[[int, int], Tensor], mask: Mask, mode: str, factor: float) -> Tensor:
    """`token(i, t)` is only asked for where the mask is true."""
    rows = [[token(i, t) for t, m in enumerate(ms) if m] for i, ms in enumerate(mask)]
    rows = [row for row in rows if row]
    zero = torch.zeros((), dtype=torch.float64)
    if not rows:
        return zero
    num_tokens, num_rows = sum(map(len, rows)), len(rows)
    sums = [sum(row, zero) for row in rows]
    if mode == "token-mean":
        return sum(sums, zero) / num_tokens
    if mode == "token-sum":
        return sum(sums, zero)
    if mode == "seq-mean-token-sum":
        return sum(sums, zero) / num_rows
    if mode == "seq-mean-token-mean":
        return sum((s / len(row) for s, row in zip(sums, rows, strict=True)), zero) / num_rows
    assert mode == "seq-mean-token-sum-norm", mode
    return sum(sums, zero) / (num_rows * factor)


def ppo_token(
    x: Tensor, old: float, a: float, low: float, high: float, c: float | None, weight: float
) -> Tensor:
    """One token of PPO, by cases on the ratio instead of by max and min."""
    d = x - old
    if abs(d.item()) > 20.0:
        d = torch.tensor(math.copysign(20.0, d.item()), dtype=torch.float64) + 0.0 * x
    ratio = torch.exp(d)
    r = ratio.item()
    if a >= 0 and r > 1 + high:
        loss = -a * (1 + high) + 0.0 * x
    elif a < 0 and r < 1 - low:
        loss = -a * (1 - low) + 0.0 * x
    elif a < 0 and c is not None and r > c:
        loss = -a * c + 0.0 * x
    else:
        loss = -a * ratio
    return loss * weight


def value_token(v: Tensor, old: float, target: float, clip: float | None) -> Tensor:
    plain = (v - target) ** 2
    if clip is None or abs(v.item() - old) <= clip:
        return 0.5 * plain
    edge = (old + math.copysign(clip, v.item() - old) - target) ** 2
    return 0.5 * plain if plain.item() >= edge else 0.5 * edge + 0.0 * v


def kl_value(x: float, y: float, kind: str) -> float:
    if kind in ("kl", "k1"):
        return x - y
    if kind == "abs":
        return abs(x - y)
    if kind in ("mse", "k2"):
        return (x - y) ** 2 / 2
    d = min(max(y - x, -20.0), 20.0)
    return min(max(math.exp(d) - d - 1, -10.0), 10.0)


def kl_slope(x: float, y: float, kind: str) -> float:
    """d KL / d log_prob."""
    if kind.endswith("+") or kind in ("mse", "k2"):
        return x - y
    if kind in ("kl", "k1"):
        return 1.0
    if kind == "abs":
        return math.copysign(1.0, x - y) if x != y else 0.0
    d = y - x
    return 1 - math.exp(d) if abs(d) < 20 and math.exp(d) - d - 1 < 10 else 0.0
