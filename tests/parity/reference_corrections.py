"""Slow references for rollout correction, preference losses and process rewards, written apart."""

from __future__ import annotations

import math

Rows = list[list[float]]
Mask = list[list[bool]]


def clip(x: float, bound: float = 20.0) -> float:
    return max(-bound, min(bound, x))


def ratios_of_rows(old: Rows, rollout: Rows, mask: Mask) -> Rows:
    """π_old/π_rollout of each row's own tokens, nothing else in the list."""
    return [
        [math.exp(clip(o - r)) for o, r, m in zip(os, rs, ms, strict=True) if m]
        for os, rs, ms in zip(old, rollout, mask, strict=True)
    ]


def product(row: list[float]) -> float:
    """Of the ratios, held within e^±20."""
    return math.exp(clip(math.fsum(math.log(r) for r in row)))


def spread_out(rows: Rows, mask: Mask) -> Rows:
    """Each row's numbers back at the places of its tokens, 0 elsewhere."""
    left = [iter(row) for row in rows]
    return [[next(numbers) if m else 0.0 for m in ms] for numbers, ms in zip(left, mask, strict=True)]


def weight(ratio: float, low: float | None, high: float) -> float:
    if low is None:
        return high if ratio > high else ratio
    return ratio if low <= ratio <= high else 0.0


def weights(
    old: Rows, rollout: Rows, mask: Mask, level: str, low: float | None, high: float, normalise: bool
) -> Rows:
    rows = ratios_of_rows(old, rollout, mask)
    if level == "token":
        found = [[weight(r, low, high) for r in row] for row in rows]
        unit = [w for row in found for w in row]
    else:
        found = [[weight(product(row), low, high)] * len(row) for row in rows]
        unit = [row[0] for row in found if row]
    mean = math.fsum(unit) / len(unit) if unit else 0.0
    if normalise and mean > 0:
        found = [[w / mean for w in row] for row in found]
    return spread_out(found, mask)


def statistic(ratio: float, kind: str) -> float:
    """k1 as a ratio of the rollout to training, k2 and k3 in nats."""
    if kind == "k1":
        return 1.0 / ratio
    return math.log(ratio) ** 2 / 2 if kind == "k2" else ratio - 1.0 - math.log(ratio)


def joined(values: list[float], kind: str, over: str) -> float:
    if over == "seq_max":
        return max(values)
    if kind == "k1":  # ratios multiply
        total = math.fsum(math.log(v) for v in values)
        return math.exp(total if over == "seq_sum" else total / len(values))
    return math.fsum(values) if over == "seq_sum" else math.fsum(values) / len(values)


def keep(
    old: Rows, rollout: Rows, mask: Mask, rules: list[tuple[str, str, float, float]]
) -> list[list[bool]]:
    """rules: (over, k, low, high), where bounds of k1 are ratios."""
    out = []
    for row, ms in zip(ratios_of_rows(old, rollout, mask), mask, strict=True):
        good = [True] * len(row)
        for over, kind, low, high in rules:
            values = [statistic(r, kind) for r in row]
            if over != "token" and values:
                values = [joined(values, kind, over)] * len(row)
            good = [g and low <= v <= high for g, v in zip(good, values, strict=True)]
        places = iter(good)
        out.append([m and next(places) for m in ms])
    return out


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def metrics(
    old: Rows,
    rollout: Rows,
    mask: Mask,
    applied: Rows | None,
    kept: Mask | None,
    level: str,
    low: float,
    high: float,
) -> dict[str, float]:
    rows = [row for row in ratios_of_rows(old, rollout, mask) if row]
    tokens = [r for row in rows for r in row]
    full = [i for i, ms in enumerate(mask) if any(ms)]
    trained = [mean([x for x, m in zip(old[i], mask[i], strict=True) if m]) for i in full]
    sampled = [mean([x for x, m in zip(rollout[i], mask[i], strict=True) if m]) for i in full]
    ratios = tokens if level == "token" else [product(row) for row in rows]
    w = ratios
    if applied is not None:
        w_rows = [[x for x, m in zip(applied[i], mask[i], strict=True) if m] for i in full]
        w = [x for row in w_rows for x in row] if level == "token" else [row[0] for row in w_rows]
    kept = mask if kept is None else kept
    lost = [[m and not k for m, k in zip(ms, ks, strict=True)] for ms, ks in zip(mask, kept, strict=True)]
    square = math.fsum(x * x for x in w)
    return {
        "kl": mean([-math.log(r) for r in tokens]),
        "k3_kl": mean([r - 1 - math.log(r) for r in tokens]),
        "chi2_token": mean([r * r for r in tokens]) - 1 if tokens else 0.0,
        "chi2_seq": mean([product(row) ** 2 for row in rows]) - 1 if rows else 0.0,
        "training_ppl": mean([math.exp(-x) for x in trained]),
        "rollout_ppl": mean([math.exp(-x) for x in sampled]),
        "log_ppl_diff": mean([s - t for s, t in zip(sampled, trained, strict=True)]),
        "ppl_ratio": mean([math.exp(-t) / math.exp(-s) for s, t in zip(sampled, trained, strict=True)]),
        "rollout_is_mean": mean(w),
        "rollout_is_std": math.sqrt(math.fsum((x - mean(w)) ** 2 for x in w) / (len(w) - 1))
        if len(w) > 1
        else 0.0,
        "rollout_is_min": min(w, default=0.0),
        "rollout_is_max": max(w, default=0.0),
        "rollout_is_eff_sample_size": math.fsum(w) ** 2 / (len(w) * square) if square else 0.0,
        "rollout_is_ratio_fraction_high": mean([float(r > high) for r in ratios]),
        "rollout_is_ratio_fraction_low": mean([float(r < low) for r in ratios]),
        "rollout_rs_masked_fraction": mean(
            [float(x) for row, ms in zip(lost, mask, strict=True) for x, m in zip(row, ms, strict=True) if m]
        ),
        "rollout_rs_seq_masked_fraction": mean([float(any(lost[i])) for i in full]),
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def minus_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x)) if x >= 0 else math.log1p(math.exp(x)) - x


Pair = tuple[float, float, float]
"""A loss, its slope in the chosen response's number, its slope in the rejected one's."""


def dpo(chosen: float, rejected: float, beta: float, swapped: float) -> Pair:
    h = beta * (chosen - rejected)
    slope = beta * (swapped * sigmoid(h) - (1 - swapped) * sigmoid(-h))
    return (1 - swapped) * minus_log_sigmoid(h) + swapped * minus_log_sigmoid(-h), slope, -slope


def ipo(chosen: float, rejected: float, beta: float) -> Pair:
    gap = chosen - rejected - 1 / (2 * beta)
    return gap**2, 2 * gap, -2 * gap


def kto(
    delta: float, good: bool, z: float, beta: float, weight_good: float, weight_bad: float
) -> tuple[float, float]:
    side = 1 if good else -1
    factor = weight_good if good else weight_bad
    value = sigmoid(side * beta * (delta - z))
    return factor * (1 - value), -factor * side * beta * value * sigmoid(-side * beta * (delta - z))


def simpo(
    chosen: float, rejected: float, len_chosen: int, len_rejected: int, beta: float, margin: float
) -> Pair:
    h = beta * chosen / len_chosen - beta * rejected / len_rejected - margin
    return minus_log_sigmoid(h), -beta * sigmoid(-h) / len_chosen, beta * sigmoid(-h) / len_rejected


def orpo(chosen: float, rejected: float, len_chosen: int, len_rejected: int, factor: float) -> Pair:
    p, q = math.exp(chosen / len_chosen), math.exp(rejected / len_rejected)
    odds = math.log(p) - math.log(1 - p) - math.log(q) + math.log(1 - q)
    push = factor * sigmoid(-odds)
    return (
        -chosen / len_chosen + factor * minus_log_sigmoid(odds),
        (-1 - push / (1 - p)) / len_chosen,
        push / (1 - q) / len_rejected,
    )


def bradley_terry(chosen: float, rejected: float, margin: float) -> Pair:
    h = chosen - rejected - margin
    return minus_log_sigmoid(h), -sigmoid(-h), sigmoid(-h)


def implicit_rewards(log_prob: Rows, ref: Rows, mask: Mask, beta: float, whole: bool) -> Rows:
    out = []
    for xs, ys, ms in zip(log_prob, ref, mask, strict=True):
        row = [beta * (x - y) if m else 0.0 for x, y, m in zip(xs, ys, ms, strict=True)]
        if whole and any(ms):
            last = max(t for t, m in enumerate(ms) if m)
            row = [math.fsum(row) if t == last else 0.0 for t in range(len(row))]
        out.append(row)
    return out


def process_reward_loss(
    log_prob: Rows, ref: Rows, mask: Mask, outcome: list[float], beta: float
) -> tuple[float, Rows, float, float]:
    """Loss, its slope in every log-prob, accuracy, mean probability."""
    rows = [i for i, ms in enumerate(mask) if any(ms)]
    slopes = [[0.0] * len(ms) for ms in mask]
    losses, right, probability = [], [], []
    for i in rows:
        tokens = [t for t, m in enumerate(mask[i]) if m]
        h = math.fsum(beta * (log_prob[i][t] - ref[i][t]) for t in tokens)
        losses.append(outcome[i] * minus_log_sigmoid(h) + (1 - outcome[i]) * minus_log_sigmoid(-h))
        right.append(float((h > 0) == (outcome[i] > 0.5)))
        probability.append(sigmoid(h))
        for t in tokens:
            slopes[i][t] = beta * (sigmoid(h) - outcome[i]) / len(rows)
    return mean(losses), slopes, mean(right), mean(probability)
