"""Rollout correction of a batch: importance weights and rejection as columns of its rows, and metrics.

rollout_log_probs, log-probs of the trainer ──correct_rollout──► rollout_is_weights, tokens to keep, metrics
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import Ratio
from hybridflow.algorithms.rollout_correction import (
    Bounds,
    correction_metrics,
    deviation_sums,
    rejection,
    rollout_weights,
    spread_of_deviations,
)
from hybridflow.config.algorithm import RolloutCorrectionConfig
from hybridflow.config.thresholds import parse_is_threshold, parse_rejection
from hybridflow.observability.metrics import Kind, Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory

CORRECTED = "rollout_corr/corrected"
"""Metric: 1 where there are weights or rejection."""
DEVIATION = "rollout_corr/deviation"
DEVIATION_SQUARED = "rollout_corr/deviation_squared"
"""Sums over parts of a batch, which `complete_correction` takes out."""


@dataclass(frozen=True)
class Correction:
    """The result of rollout correction on a batch."""

    weights: Tensor | None
    """rollout_is_weights [B, R] float32; None without `rollout_is`."""
    keep: Tensor | None
    """[B, R] bool, a subset of `loss_mask`; None without `rollout_rs`."""
    metrics: Metrics


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig, log_probs: Tensor) -> Correction:
    """Compare `log_probs` [B, R] of the trainer with the rollout's on the tokens of `loss_mask`.

    Weights are of all sampled tokens: a row that is left out of the loss still counts in the baseline of its
    group. A sequence is a trajectory, with the tokens of all its rows. The demonstrations of SPIN, which no
    policy sampled, are neither weighted nor rejected nor measured.
    """
    view = ByTrajectory(batch)
    rows = view.samples.batch
    log_probs = view.join(log_probs)
    mask = rows["loss_mask"]
    rollout = rows["rollout_log_probs"]
    own = sampled_rows(view.samples)[:, None]
    sampled = mask & own
    bounds = parse_is_threshold(config.rollout_is_threshold)
    weights = None
    if config.rollout_is:
        weights = rollout_weights(
            log_probs,
            rollout,
            rows["response_mask"] & own,
            level=config.rollout_is,
            bounds=bounds,
            batch_normalize=config.rollout_is_batch_normalize,
            normalize_over=sampled,
        )
    keep = None
    if config.rollout_rs:
        rules = parse_rejection(config.rollout_rs, config.rollout_rs_threshold)
        keep = rejection(log_probs, rollout, sampled, rules)
    metrics = Metrics()
    if config.corrects:
        metrics.add_mean(CORRECTED, 1.0, 1.0)
    level = config.rollout_is or "token"
    measured = correction_metrics(
        log_probs, rollout, sampled, weights=weights, keep=keep, level=level, bounds=bounds
    )
    num_weights = float(sampled.sum())
    if level == "sequence":
        num_weights = float(sampled.any(-1).sum())
    for name, value in _add_parts(metrics, measured).items():
        # in bypass mode a mini-batch counts by its weights
        metrics.add_mean(name, value * num_weights, num_weights)
    outside = mask & ~sampled
    if weights is not None:
        weights = view.spread(torch.where(outside, 1.0, weights))
    if keep is not None:
        keep = view.spread(keep | outside)
    return Correction(weights, keep, metrics)


def measure_correction(batch: DataProto, bounds: Bounds) -> Metrics:
    """Return `rollout_corr/*` of a part of a batch that is not corrected, in whole trajectories.

    Merged parts become the metrics of the batch by `complete_correction`. `bounds` are those of
    `rollout_is_threshold`.
    """
    view = ByTrajectory(batch)
    rows = view.samples.batch
    sampled = rows["loss_mask"] & sampled_rows(view.samples)[:, None]
    metrics = Metrics()
    if not bool(sampled.any()):
        return metrics
    log_probs = (rows["old_log_probs"], rows["rollout_log_probs"])
    _add_parts(metrics, correction_metrics(*log_probs, sampled, bounds=bounds))
    total, squares = deviation_sums(*log_probs, sampled)
    metrics.add_mean(DEVIATION, total, float(sampled.sum()))
    metrics.add_mean(DEVIATION_SQUARED, squares, float(sampled.sum()))
    return metrics


def _add_parts(metrics: Metrics, measured: Mapping[str, Ratio | float]) -> dict[str, float]:
    """Add the means, minima and maxima, which parts of a batch add up to; return the other numbers."""
    whole: dict[str, float] = {}
    for name, value in measured.items():
        if isinstance(value, tuple):
            metrics.add_mean(name, *value)
        elif name.endswith("_min"):
            metrics.add_min(name, value)
        elif name.endswith("_max"):
            metrics.add_max(name, value)
        else:
            whole[name] = value
    return whole


def complete_correction(merged: Metrics) -> Metrics:
    """Return the metrics with what cannot be added up over parts: standard deviation and sample size."""
    state = merged.state_dict()
    if DEVIATION not in state:
        return merged
    _, total, count = state.pop(DEVIATION)
    _, squares, _ = state.pop(DEVIATION_SQUARED)
    metrics = Metrics.from_state(cast("dict[str, tuple[Kind, float, float]]", state))
    for name, value in spread_of_deviations(total, squares, count).items():
        metrics.add_mean(name, value * count, count)
    return metrics


def correction_means(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """Return the metrics `rollout_corr/*` that are means, so that micro-batches and ranks add up.

    log_probs, rollout_log_probs [B, R] float, nats; mask [B, R] bool.
    """
    metrics = Metrics()
    for name, value in correction_metrics(log_probs, rollout_log_probs, mask, spread=False).items():
        assert isinstance(value, tuple), f"{name} is no mean"
        metrics.add_mean(name, *value)
    return metrics


def rows_of_version(batch: DataProto, version: int) -> Tensor:
    """Return [B] bool: the rows whose sampled tokens all carry this version of the actor's weights.

    Only there are log-probs of generation and of training those of one policy. The data's answers have none.
    """
    rows = batch.batch
    others = rows["response_mask"] & (rows["policy_version"] != version)
    whole: Tensor = ~others.any(-1)
    return whole & sampled_rows(batch)


def sampled_rows(batch: DataProto) -> Tensor:
    """Return [B] bool: the rows that the policy sampled.

    SPIN's answers of the data are not among them. Scores, lengths and entropy are measured on these rows.
    """
    if "is_demonstration" in batch:
        sampled: Tensor = ~batch.batch["is_demonstration"]
        return sampled
    return torch.ones(len(batch), dtype=torch.bool, device=batch.batch["loss_mask"].device)
