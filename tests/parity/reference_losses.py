"""Slow references of the policy losses: the papers' formulas token by token, by cases instead of by max, min
and stopped gradients.

Each takes log-probs x [B, R] (a float64 tensor, so that gradients can be asked for) and a batch of plain
floats, and gives a function (row, token) -> loss of that token; only tokens of the mask are asked for. What
the formula holds fixed is a Python float.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from reference_maths import ppo_token
from torch import Tensor

TokenLoss = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Floats:
    """A batch as lists."""

    mask: list[list[bool]]
    old: list[list[float]]
    ref: list[list[float]]
    a: list[list[float]]
    groups: list[int]
    selected: list[list[bool]] = field(default_factory=list)

    def steps(self, i: int) -> list[int]:
        return [t for t, m in enumerate(self.mask[i]) if m]

    def mean_advantage(self, i: int) -> float:
        steps = self.steps(i)
        return math.fsum(self.a[i][t] for t in steps) / len(steps) if steps else 0.0


def log_ratio(x: Tensor, old: float) -> Tensor:
    """clamp(x − old, ±20): beyond the bounds a number without a gradient."""
    d = x - old
    return (
        d
        if abs(d.item()) <= 20
        else torch.tensor(math.copysign(20.0, d.item()), dtype=torch.float64) + 0.0 * x
    )


def total(terms: list[Tensor]) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def vanilla(x: Tensor, b: Floats, clip_low: float, clip_high: float, clip_c: float | None) -> TokenLoss:
    return lambda i, t: ppo_token(x[i, t], b.old[i][t], b.a[i][t], clip_low, clip_high, clip_c, 1.0)


def gspo(x: Tensor, b: Floats, clip_low: float, clip_high: float) -> TokenLoss:
    def token(i: int, t: int) -> Tensor:
        steps, a = b.steps(i), b.a[i][t]
        mean = math.fsum(x[i, u].item() - b.old[i][u] for u in steps) / len(steps)
        s = math.exp(min(max(mean, -20.0), 20.0))
        if a > 0 and s > 1 + clip_high:
            return -a * (1 + clip_high) + 0.0 * x[i, t]
        if a < 0 and s < 1 - clip_low:
            return -a * (1 - clip_low) + 0.0 * x[i, t]
        return -a * s * (1.0 + x[i, t] - x[i, t].item())  # value s, slope s

    return token


def sapo(x: Tensor, b: Floats, tau_pos: float, tau_neg: float) -> TokenLoss:
    def token(i: int, t: int) -> Tensor:
        a = b.a[i][t]
        tau = tau_pos if a > 0 else tau_neg
        ratio = torch.exp(log_ratio(x[i, t], b.old[i][t]))
        return -a * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1)))

    return token


def geo_mean(x: Tensor, b: Floats, clip_low: float, clip_high: float) -> TokenLoss:
    def row(i: int) -> Tensor:
        """The paper's product of ratios to the power 1/length, with bounds e^±clip on the ratios."""
        a, product, steps = b.mean_advantage(i), torch.ones((), dtype=torch.float64), b.steps(i)
        for t in steps:
            d = log_ratio(x[i, t], b.old[i][t])
            if a > 0 and d.item() > clip_high:
                d = clip_high + 0.0 * x[i, t]
            if a <= 0 and d.item() < -clip_low:
                d = -clip_low + 0.0 * x[i, t]
            product = product * torch.exp(d / len(steps))
        return -a * product

    return lambda i, t: row(i)


def cispo(x: Tensor, b: Floats, clip_low: float, clip_high: float) -> TokenLoss:
    def token(i: int, t: int) -> Tensor:
        ratio = math.exp(log_ratio(x[i, t], b.old[i][t]).item())
        return -min(max(ratio, 1 - clip_low), 1 + clip_high) * b.a[i][t] * x[i, t]

    return token


def reinforce(x: Tensor, b: Floats) -> TokenLoss:
    return lambda i, t: -b.a[i][t] * x[i, t]


def clip_cov(x: Tensor, b: Floats, clip_low: float, clip_high: float) -> TokenLoss:
    plain = vanilla(x, b, clip_low, clip_high, None)
    return lambda i, t: 0.0 * x[i, t] if b.selected[i][t] else plain(i, t)


def kl_cov(x: Tensor, b: Floats, ppo_kl_coef: float) -> TokenLoss:
    def token(i: int, t: int) -> Tensor:
        d = log_ratio(x[i, t], b.old[i][t])
        penalty = ppo_kl_coef * (d if d.item() >= 0 else -d) if b.selected[i][t] else 0.0
        return -b.a[i][t] * torch.exp(d) + penalty

    return token


def covariances(x: Tensor, b: Floats) -> dict[tuple[int, int], float]:
    tokens = [(i, t) for i in range(len(b.mask)) for t in b.steps(i)]
    mean_a = math.fsum(b.a[i][t] for i, t in tokens) / len(tokens)
    mean_x = math.fsum(x[i, t].item() for i, t in tokens) / len(tokens)
    return {(i, t): (b.a[i][t] - mean_a) * (x[i, t].item() - mean_x) for i, t in tokens}


def clip_cov_candidates(
    x: Tensor, b: Floats, clip_low: float, clip_high: float, lb: float, ub: float
) -> set[tuple[int, int]]:
    def clipped_already(i: int, t: int) -> bool:
        ratio, a = math.exp(log_ratio(x[i, t], b.old[i][t]).item()), b.a[i][t]
        return (a > 0 and ratio > 1 + clip_high) or (a < 0 and ratio < 1 - clip_low)

    return {
        place for place, cov in covariances(x, b).items() if lb < cov < ub and not clipped_already(*place)
    }


def dppo_tv(x: Tensor, b: Floats, clip_low: float, clip_high: float, clip_c: float | None) -> TokenLoss:
    def outside(p: float, p_old: float, a: float) -> bool:
        return p - p_old > clip_high if a > 0 else p - p_old < -clip_low

    return _dppo(x, b, clip_c, outside)


def dppo_kl(x: Tensor, b: Floats, clip_low: float, clip_high: float, clip_c: float | None) -> TokenLoss:
    def term(p: float, q: float) -> float:
        if p == 0:
            return 0.0
        return math.inf if q == 0 else p * math.log(p / q)

    def outside(p: float, p_old: float, a: float) -> bool:
        p, p_old = min(p, 1.0), min(p_old, 1.0)
        d = term(p_old, p) + term(1 - p_old, 1 - p)
        return p > p_old and d > clip_high if a > 0 else p < p_old and d > clip_low

    return _dppo(x, b, clip_c, outside)


def _dppo(
    x: Tensor, b: Floats, clip_c: float | None, outside: Callable[[float, float, float], bool]
) -> TokenLoss:
    def token(i: int, t: int) -> Tensor:
        a, ratio = b.a[i][t], math.exp(log_ratio(x[i, t], b.old[i][t]).item())
        if outside(math.exp(x[i, t].item()), math.exp(b.old[i][t]), a):
            return 0.0 * x[i, t]
        return -a * (ratio if clip_c is None else min(ratio, clip_c)) * x[i, t]

    return token


def dro(x: Tensor, b: Floats, dro_beta: float) -> TokenLoss:
    return lambda i, t: -(b.a[i][t] * x[i, t] - dro_beta / 2 * (x[i, t] - b.old[i][t]) ** 2)


def sppo(x: Tensor, b: Floats) -> TokenLoss:
    def token(i: int, t: int) -> Tensor:
        steps = b.steps(i)
        return (total([x[i, u] - b.old[i][u] for u in steps]) - b.mean_advantage(i)) ** 2 / len(steps)

    return token


def dpo(x: Tensor, b: Floats, dpo_loss: str, dpo_beta: float, dpo_label_smoothing: float) -> TokenLoss:
    def moved(i: int) -> Tensor:
        return total([x[i, u] - b.ref[i][u] for u in b.steps(i)])

    def pair(i: int, j: int) -> Tensor:
        h = moved(i) - moved(j)
        if dpo_loss == "ipo":
            return (h - 1 / (2 * dpo_beta)) ** 2
        h = dpo_beta * h
        minus_log_sigmoid = [torch.logaddexp(torch.zeros_like(h), sign * h) for sign in (-1.0, 1.0)]
        return (1 - dpo_label_smoothing) * minus_log_sigmoid[0] + dpo_label_smoothing * minus_log_sigmoid[1]

    def token(i: int, t: int) -> Tensor:
        members = [j for j in range(len(b.mask)) if b.groups[j] == b.groups[i]]
        good = [j for j in members if b.mean_advantage(j) > 0]
        bad = [j for j in members if b.mean_advantage(j) < 0]
        if i not in good + bad or not good or not bad:
            return 0.0 * x[i, t]
        return total([pair(j, k) for j in good for k in bad]) / (len(good) * len(bad)) / len(b.steps(i))

    return token
