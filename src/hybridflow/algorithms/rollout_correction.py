"""Rollout correction: importance weights, rejection and metrics for the policy that sampled against the one
that trains.

    logπ_old, logπ_rollout ──┬─ rollout_weights    ─► weights [B, R] that multiply the token loss
                             ├─ rejection          ─► keep [B, R] bool, which narrows `loss_mask`
                             └─ correction_metrics ─► rollout_corr/*

π_rollout is the policy that the generation engine sampled from; π_old is the policy that the trainer
recomputes, in bypass mode the current one. Rows are seen whole, and an average is taken over all rows handed
in, since this runs before micro-batches are cut. Nothing has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import Ratio, masked_mean, masked_sum, masked_var, zero_outside
from hybridflow.errors import ConfigError

LEVELS = ("token", "sequence")
Bounds = tuple[float | None, float]
"""(None, u) truncates weights above u; (lo, hi) sets those outside to 0."""
Rule = tuple[str, str, float, float]
"""(token, seq_sum, seq_mean or seq_max; k1, k2 or k3; lower and upper bound of it in nats)."""
_KEY = "algorithm.rollout_correction"


def rollout_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    *,
    level: str,
    bounds: Bounds,
    batch_normalize: bool = False,
    normalize_over: Tensor | None = None,
) -> Tensor:
    """w_t = min(ρ_t, threshold); by token ρ_t = exp(logr_t), by sequence ρ_t = exp(clamp(Σ_t logr_t, ±20));
    with logr = clamp(logπ_old − logπ_rollout, ±20); bounds written `lo_hi` set weights outside [lo, hi] to 0
    instead (IcePop).

    `bounds` is either the threshold or both. old_log_prob, rollout_log_prob [B, R] float, nats; mask [B, R]
    bool; `level` is token or sequence. Returns [B, R] float without gradient, 0 outside the mask.
    `batch_normalize` divides by the mean of the truncated weights, over tokens or (sequence) over rows with
    tokens, of `normalize_over` [B, R] bool (default: the mask). Raises ConfigError for another level.

    Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"; a lower bound too: IcePop, 2510.18855. Left out: weights of prefixes (products up
    to t).
    """
    low, high = bounds
    weights = _ratios(_log_ratio(old_log_prob, rollout_log_prob, mask), level)
    if low is None:
        weights = weights.clamp(max=high)
    else:
        weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
    if batch_normalize:
        counted = mask.bool()
        if normalize_over is not None:
            counted = counted & normalize_over.bool()
        if level == "token":
            mean = masked_mean(weights, counted)
        else:
            mean = masked_mean(weights[:, 0], counted.any(-1))
        weights = weights / torch.where(mean > 0, mean, 1.0)
    return zero_outside(weights, mask)


def rejection(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, rules: Iterable[Rule]) -> Tensor:
    """k1 = −logr in [log lo, log hi], k2 = ½·logr² ≤ u, k3 = e^logr − 1 − logr ≤ u; logr = clamp(logπ_old −
    logπ_rollout, ±20).

    `rules` are over `token` (each token for itself) or over `seq_sum`, `seq_mean`, `seq_max` (the statistic
    over the row's tokens decides on the row as a whole); what stays has passed them all. The bounds of k1 are
    those of the ratio π_rollout/π_old, of a row the product or the geometric mean of ratios. old_log_prob,
    rollout_log_prob [B, R] float, nats; mask [B, R] bool. Returns the tokens to keep, [B, R] bool, a subset
    of the mask; a statistic that is no number is rejected.

    Rejection of whole rows by k1: Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse
    from the training-inference mismatch". k1, k2 and k3 are the estimators of John Schulman, "Approximating
    KL divergence" (2020). Left out: a veto by one token's own ratio, which seq_max_k2 and seq_max_k3 are.
    """
    log_ratio = _log_ratio(old_log_prob, rollout_log_prob, mask)
    keep = mask.bool()
    for over, statistic, low, high in rules:
        value = _statistic(log_ratio, statistic)
        if over == "seq_sum":
            value = masked_sum(value, mask, dim=-1)[:, None]
        elif over == "seq_mean":
            value = masked_mean(value, mask, dim=-1)[:, None]
        elif over == "seq_max":
            # k2 and k3 are never below the 0 that stands outside the mask
            value = value.amax(-1, keepdim=True)
        keep = keep & (value >= low) & (value <= high)
    return keep


def correction_metrics(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
    level: str = "token",
    bounds: Bounds = (None, 2.0),
    spread: bool = True,
) -> dict[str, Ratio | float]:
    """How far training and rollout are apart: `rollout_corr/*`, also where nothing is corrected (weights,
    keep None).

    With logr and the tokens of mask [B, R] bool as in `rollout_weights`, means over tokens: `kl` −logr ·
    `k3_kl` e^logr − 1 − logr · `chi2_token` e^(2·logr) − 1. Means over rows with tokens: `training_ppl`,
    `rollout_ppl` exp(−mean_t logπ) · `log_ppl_diff` mean_t(logπ_rollout − logπ_old) · `ppl_ratio` exp of it ·
    `chi2_seq` e^(2·clamp(Σ logr, ±20)) − 1. `rollout_is_{mean,std,min,max,eff_sample_size}`: of `weights`, or
    without them of the ratios ρ that they would be made of; over tokens, or for the level `sequence` over
    rows; the last is (Σw)²/(N·Σw²), 1 where all are equal. `rollout_is_ratio_fraction_high`, `_low`: part of
    the ρ above hi and below lo; of a number u only the high ones are cut, and lo is 1/u.
    `rollout_rs_masked_fraction`: part of the tokens rejected; `rollout_rs_seq_masked_fraction`: part of the
    rows that lost some token. Everything in float64. (numerator, denominator) where parts of a batch can be
    added up, else a float; 0 where there are no tokens. Without `spread` the floats are left out (`std`,
    `min`, `max`, `eff_sample_size`), for which the host would wait for the device.
    """
    old = zero_outside(old_log_prob, mask).detach().double()
    rollout = zero_outside(rollout_log_prob, mask).detach().double()
    log_ratio = _log_ratio(old, rollout, mask)
    rows = mask.bool().any(-1)
    sums = log_ratio.sum(-1).clamp(-20.0, 20.0)
    old_mean = masked_mean(old, mask, dim=-1)
    rollout_mean = masked_mean(rollout, mask, dim=-1)
    kept = mask.bool() if keep is None else keep.bool()
    found: dict[str, Ratio | float] = {
        "kl": _mean(-log_ratio, mask),
        "k3_kl": _mean(_statistic(log_ratio, "k3"), mask),
        "chi2_token": _mean((2.0 * log_ratio).expm1(), mask),
        "chi2_seq": _mean((2.0 * sums).expm1(), rows),
        "training_ppl": _mean((-old_mean).exp(), rows),
        "rollout_ppl": _mean((-rollout_mean).exp(), rows),
        "log_ppl_diff": _mean(rollout_mean - old_mean, rows),
        "ppl_ratio": _mean((rollout_mean - old_mean).exp(), rows),
        "rollout_rs_masked_fraction": _mean(~kept, mask),
        "rollout_rs_seq_masked_fraction": _mean((mask.bool() & ~kept).any(-1), rows),
    }
    ratios = _ratios(log_ratio, level)
    applied = ratios if weights is None else weights.detach().double()
    units = mask.bool()
    if level == "sequence":  # one number a row, which its sampled tokens share
        ratios = ratios[:, 0]
        applied = zero_outside(applied, mask).amax(-1)
        units = rows
    low, high = bounds
    found["rollout_is_ratio_fraction_high"] = _mean(ratios > high, units)
    found["rollout_is_ratio_fraction_low"] = _mean(ratios < (1.0 / high if low is None else low), units)
    found["rollout_is_mean"] = _mean(applied, units)
    if spread:
        found |= _spread(applied, units)
    return {f"rollout_corr/{name}": value for name, value in found.items()}


def deviation_sums(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ(ρ_t − 1) and Σ(ρ_t − 1)² over the tokens of the mask [B, R] bool, in float64.

    Those of parts of a batch can be added up. They are of the deviation from 1, because ratios are near it.
    """
    old = zero_outside(old_log_prob, mask).double()
    deviations = _log_ratio(old, zero_outside(rollout_log_prob, mask).double(), mask).expm1()
    return masked_sum(deviations, mask), masked_sum(deviations.square(), mask)


def spread_of_deviations(total: float, squares: float, count: float) -> dict[str, float]:
    """Return `rollout_is_std` and `rollout_is_eff_sample_size` of `count` > 0 ratios, by the sums of
    `deviation_sums`.
    """
    variance = (squares - total**2 / count) / max(count - 1.0, 1.0)
    size = (count + total) ** 2 / (count * (count + 2.0 * total + squares))
    return {
        "rollout_corr/rollout_is_std": max(variance, 0.0) ** 0.5,
        "rollout_corr/rollout_is_eff_sample_size": size,
    }


def _mean(x: Tensor, mask: Tensor) -> Ratio:
    return masked_sum(x.double(), mask), mask.bool().sum()


def _spread(weights: Tensor, units: Tensor) -> dict[str, Ratio | float]:
    w = weights[units]
    if not w.numel():
        return {f"rollout_is_{name}": 0.0 for name in ("std", "min", "max", "eff_sample_size")}
    squares = float(w.square().sum())
    return {
        "rollout_is_std": float(masked_var(w, torch.ones_like(w)).sqrt()),
        "rollout_is_min": float(w.min()),
        "rollout_is_max": float(w.max()),
        "rollout_is_eff_sample_size": float(w.sum()) ** 2 / (w.numel() * squares) if squares else 0.0,
    }


def _log_ratio(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    old = zero_outside(old_log_prob, mask).detach()
    rollout = zero_outside(rollout_log_prob, mask).detach()
    return (old - rollout).clamp(-20.0, 20.0)


def _ratios(log_ratio: Tensor, level: str) -> Tensor:
    """ρ [B, R]; by sequence the same one at every position, those outside the mask included."""
    if level not in LEVELS:
        raise ConfigError(f"{_KEY}.rollout_is got {level!r}: set token or sequence, or null for no weights")
    if level == "token":
        return log_ratio.exp()
    return log_ratio.sum(-1, keepdim=True).clamp(-20.0, 20.0).exp().expand_as(log_ratio)


def _statistic(log_ratio: Tensor, name: str) -> Tensor:
    if name == "k1":
        return -log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.expm1() - log_ratio
