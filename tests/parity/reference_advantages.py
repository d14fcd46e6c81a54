"""Slow references of the estimators in float64: the formulas of the papers as plain loops over Python floats,
apart from the library.

Tables are lists of rows; a row counts in its group where its mask has a true entry. Every function gives a
table of advantages.
"""

from __future__ import annotations

import math

from reference_maths import Mask, Rows, whiten

Groups = list[int]


def scores_of(rewards: Rows, mask: Mask) -> list[float]:
    return [
        math.fsum(r for r, m in zip(rs, ms, strict=True) if m) for rs, ms in zip(rewards, mask, strict=True)
    ]


def members(i: int, mask: Mask, groups: Groups) -> list[int]:
    return [j for j in range(len(mask)) if groups[j] == groups[i] and any(mask[j])]


def says_nothing(i: int, scores: list[float], mask: Mask, groups: Groups) -> bool:
    """An empty row, a row alone, or a group of equal scores: the advantage is 0."""
    values = [scores[j] for j in members(i, mask, groups)]
    return not any(mask[i]) or max(values) == min(values)


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std_of(values: list[float]) -> float:
    return math.sqrt(math.fsum((v - mean_of(values)) ** 2 for v in values) / (len(values) - 1))


def spread(per_row: list[float], mask: Mask) -> Rows:
    return [[a if m else 0.0 for m in ms] for a, ms in zip(per_row, mask, strict=True)]


def normalised(i: int, scores: list[float], mask: Mask, groups: Groups) -> float:
    if says_nothing(i, scores, mask, groups):
        return 0.0
    values = [scores[j] for j in members(i, mask, groups)]
    return (scores[i] - mean_of(values)) / (std_of(values) + 1e-6)


def grpo_passk(rewards: Rows, mask: Mask, groups: Groups, norm_by_std: bool) -> Rows:
    scores, out = scores_of(rewards, mask), []
    for i in range(len(mask)):
        a = 0.0
        if not says_nothing(i, scores, mask, groups):
            values = [scores[j] for j in members(i, mask, groups)]
            first, second = sorted(values, reverse=True)[:2]
            if scores[i] == first and first > second:
                a = (first - second) / (std_of(values) + 1e-6) if norm_by_std else first - second
        out.append(a)
    return spread(out, mask)


def gdpo(components: Rows, mask: Mask, groups: Groups, weights: list[float], loss_mask: Mask) -> Rows:
    keys = range(len(weights))
    columns = [[row[k] for row in components] for k in keys]
    total = [
        math.fsum(weights[k] * normalised(i, columns[k], mask, groups) for k in keys)
        for i in range(len(mask))
    ]
    learned = [i for i in range(len(mask)) if any(loss_mask[i])]
    if not learned:
        return spread([0.0] * len(mask), loss_mask)
    mean = mean_of([total[i] for i in learned])
    var = std_of([total[i] for i in learned]) ** 2 if len(learned) > 1 else 0.0
    per_row = [(a - mean) / math.sqrt(var + 1e-8) for a in total]
    silent = [all(says_nothing(i, columns[k], mask, groups) for k in keys) for i in range(len(mask))]
    return spread([0.0 if quiet else a for a, quiet in zip(per_row, silent, strict=True)], loss_mask)


def rloo(rewards: Rows, mask: Mask, groups: Groups) -> Rows:
    scores, out = scores_of(rewards, mask), []
    for i in range(len(mask)):
        others = [scores[j] for j in members(i, mask, groups) if j != i]
        out.append(0.0 if says_nothing(i, scores, mask, groups) else scores[i] - mean_of(others))
    return spread(out, mask)


def to_go(rewards: Rows, mask: Mask, gamma: float) -> Rows:
    """Each row's sampled tokens as a sequence of their own; G_k = Σ_{j ≥ k} γ^(j−k) r_j."""
    out = [[0.0] * len(row) for row in mask]
    for i, ms in enumerate(mask):
        steps = [t for t, m in enumerate(ms) if m]
        for k, t in enumerate(steps):
            out[i][t] = math.fsum(gamma ** (j - k) * rewards[i][steps[j]] for j in range(k, len(steps)))
    return out


def reinforce_plus_plus_baseline(rewards: Rows, mask: Mask, groups: Groups, loss_mask: Mask) -> Rows:
    scores, centred = scores_of(rewards, mask), []
    for i in range(len(mask)):
        values = [scores[j] for j in members(i, mask, groups)]
        centred.append(0.0 if says_nothing(i, scores, mask, groups) else scores[i] - mean_of(values))
    whitened = whiten(spread(centred, mask), loss_mask)
    return [
        [0.0] * len(row) if says_nothing(i, scores, mask, groups) else row for i, row in enumerate(whitened)
    ]


def remax(rewards: Rows, mask: Mask, baselines: list[float]) -> Rows:
    return [
        [g - b if m else 0.0 for g, m in zip(gs, ms, strict=True)]
        for gs, ms, b in zip(to_go(rewards, mask, 1.0), mask, baselines, strict=True)
    ]


def opo(rewards: Rows, mask: Mask, groups: Groups) -> Rows:
    scores, lengths, out = scores_of(rewards, mask), [sum(ms) for ms in mask], []
    for i in range(len(mask)):
        a = 0.0
        if not says_nothing(i, scores, mask, groups):
            group = members(i, mask, groups)
            a = scores[i] - math.fsum(lengths[j] * scores[j] for j in group) / sum(lengths[j] for j in group)
        out.append(a)
    return spread(out, mask)


def gpg(rewards: Rows, mask: Mask, groups: Groups) -> Rows:
    scores = scores_of(rewards, mask)
    rows = sum(any(ms) for ms in mask)
    varying = sum(not says_nothing(i, scores, mask, groups) for i in range(len(mask)))
    out = []
    for i in range(len(mask)):
        mean = mean_of([scores[j] for j in members(i, mask, groups)] or [0.0])
        out.append(0.0 if says_nothing(i, scores, mask, groups) else rows / varying * (scores[i] - mean))
    return spread(out, mask)


def max_rl(rewards: Rows, mask: Mask, groups: Groups) -> Rows:
    scores, out = scores_of(rewards, mask), []
    for i in range(len(mask)):
        mean = mean_of([scores[j] for j in members(i, mask, groups)] or [0.0])
        out.append(0.0 if says_nothing(i, scores, mask, groups) or mean <= 0 else (scores[i] - mean) / mean)
    return spread(out, mask)


def optimal_token_baseline(
    rewards: Rows, mask: Mask, groups: Groups, log_probs: Rows, squares: Rows, weights: Rows | None
) -> tuple[Rows, Rows]:
    """Advantages and rewards to go."""
    scores, returns = scores_of(rewards, mask), to_go(rewards, mask, 1.0)
    out = [[0.0] * len(row) for row in mask]

    def so_far(j: int, t: int) -> float:
        total = 0.0
        for u in range(t + 1):
            if mask[j][u]:
                w = 1.0 - 2.0 * math.exp(log_probs[j][u]) + squares[j][u]
                total += w if weights is None else w * weights[j][u] ** 2
        return total

    for i, ms in enumerate(mask):
        if says_nothing(i, scores, mask, groups):
            continue
        group = members(i, mask, groups)
        ends = sorted((max(t for t, m in enumerate(mask[j]) if m) + 1 for j in group), reverse=True)
        for t, m in enumerate(ms):
            if m and t < ends[1]:
                there = [j for j in group if mask[j][t]]
                total = math.fsum(so_far(j, t) for j in there)
                out[i][t] = returns[i][t] - math.fsum(returns[j][t] * so_far(j, t) for j in there) / total
            elif m:
                out[i][t] = returns[i][t]
    return out, returns


def tir_optimal_token_baseline(
    rewards: Rows, mask: Mask, groups: Groups, log_probs: Rows, squares: Rows, weights: Rows | None
) -> tuple[Rows, Rows]:
    """The same on tables from which the tokens that were not sampled are cut out."""
    width, steps = len(mask[0]), [[t for t, m in enumerate(ms) if m] for ms in mask]

    def cut(rows: Rows) -> Rows:
        return [[row[t] for t in ts] + [0.0] * (width - len(ts)) for row, ts in zip(rows, steps, strict=True)]

    compact = [[k < len(ts) for k in range(width)] for ts in steps]
    found = optimal_token_baseline(
        cut(rewards), compact, groups, cut(log_probs), cut(squares), cut(weights) if weights else None
    )
    back = []
    for rows in found:
        full = [[0.0] * width for _ in mask]
        for i, ts in enumerate(steps):
            for k, t in enumerate(ts):
                full[i][t] = rows[i][k]
        back.append(full)
    return back[0], back[1]


def prime(
    q: Rows,
    rewards: Rows,
    mask: Mask,
    groups: Groups,
    process_coef: float,
    outcome_coef: float,
    loss_mask: Mask,
) -> tuple[Rows, Rows]:
    """Advantages and returns."""
    outcome = rloo(rewards, mask, groups)
    means = [
        mean_of([v for v, m in zip(qs, ms, strict=True) if m] or [0.0])
        for qs, ms in zip(q, mask, strict=True)
    ]
    weighted = [[0.0] * len(row) for row in mask]
    for i, ms in enumerate(mask):
        group = members(i, mask, groups)
        n, steps = len(group), [t for t, m in enumerate(ms) if m]
        if n < 2:
            continue
        for t in steps:
            process = n / (n - 1) * q[i][t] - math.fsum(means[j] / (n - 1) for j in group)
            weighted[i][t] = process_coef * process + (
                outcome_coef * outcome[i][t] if t == steps[-1] else 0.0
            )
    returns = to_go(weighted, mask, 1.0)
    whitened = whiten(returns, loss_mask)
    return [
        row if len(members(i, mask, groups)) > 1 else [0.0] * len(row) for i, row in enumerate(whitened)
    ], returns


def sppo(rewards: Rows, mask: Mask, groups: Groups, eta: float, beta: float) -> Rows:
    scores, out = scores_of(rewards, mask), []
    for i in range(len(mask)):
        a = 0.0
        if not says_nothing(i, scores, mask, groups):
            a = eta * (
                scores[i]
                - math.log(mean_of([math.exp(beta * scores[j]) for j in members(i, mask, groups)])) / beta
            )
        out.append(a)
    return spread(out, mask)


def online_dpo(rewards: Rows, mask: Mask, groups: Groups, row_id: list[int]) -> Rows:
    scores, out = scores_of(rewards, mask), []
    for i in range(len(mask)):
        sign = 0.0
        if not says_nothing(i, scores, mask, groups):
            group = members(i, mask, groups)
            best = min(group, key=lambda j: (-scores[j], row_id[j]))
            worst = min(group, key=lambda j: (scores[j], row_id[j]))
            sign = {best: 1.0, worst: -1.0}.get(i, 0.0)
        out.append(sign)
    return spread(out, mask)


def spin(mask: Mask, shown: list[bool], groups: Groups) -> Rows:
    out = []
    for i in range(len(mask)):
        kinds = {shown[j] for j in members(i, mask, groups)}
        out.append((1.0 if shown[i] else -1.0) if len(kinds) == 2 else 0.0)
    return spread(out, mask)


def on_policy_distillation(student: Rows, teacher: Rows, mask: Mask) -> Rows:
    return [
        [b - a if m else 0.0 for a, b, m in zip(*rows, strict=True)]
        for rows in zip(student, teacher, mask, strict=True)
    ]
