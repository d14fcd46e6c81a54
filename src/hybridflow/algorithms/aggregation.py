"""Aggregation of token losses to one number, normalised by counts that are handed in.

A mini-batch is counted once, as a whole (`LossScale.count`, summed over ranks). Each micro-batch then
contributes its share, so the sum over micro-batches is the loss of the mini-batch, however it was cut.

The masked statistics are of the tokens that a mask [B, R] bool leaves in: values outside of it, NaN included,
have no effect. None of them fails on an empty mask or on a single token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.catalog import AGGREGATIONS
from hybridflow.errors import ConfigError

Ratio = tuple[Tensor, Tensor]
"""Numerator and denominator, detached 0-d: their sums over micro-batches and ranks give the exact mean."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has half precision or integers; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [B, R] in float32 or better with 0 where the mask is false.

    No gradient flows there, not even a NaN.
    """
    return torch.where(mask.bool(), at_least_float32(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over the tokens of the mask, of all tokens or along `dim`."""
    kept = zero_outside(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the tokens of the mask, 0 where there are none."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the Bessel-corrected variance over the tokens of the mask, 0 for fewer than two of them."""
    centred = at_least_float32(x) - masked_mean(x, mask)
    return masked_sum(centred.square(), mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x − mean)·rsqrt(var + 1e-8) over the tokens of the mask, 0 elsewhere; a single token becomes 0.

    Mean and variance are taken in float64: rsqrt(1e-8) = 1e4 would blow up the rounding of equal values.
    """
    exact = zero_outside(x, mask).double()
    whitened = (exact - masked_mean(exact, mask)) * torch.rsqrt(masked_var(exact, mask) + 1e-8)
    return zero_outside(whitened, mask).to(at_least_float32(x).dtype)


@dataclass(frozen=True)
class LossScale:
    """Counts of the whole mini-batch, by which its losses are divided."""

    num_tokens: float
    """Number of tokens in `loss_mask`."""
    num_sequences: float
    """Number of trajectories with at least one token in `loss_mask`."""
    num_positive_tokens: float = 0.0
    """Number of tokens in `loss_mask` of rows that were right."""
    trajectory_rows: Tensor | None = None
    """[B] int64, of the rows of one micro-batch: how many rows of its trajectory are learned from. None where
    every trajectory has one row.
    """
    row_weights: Tensor | None = None
    """[B] float, of the rows of one micro-batch: the losses of a row are multiplied by its weight, and the
    counts above count its tokens, and its sequence, as many times. None where each counts once.
    """

    @classmethod
    def count(
        cls,
        loss_mask: Tensor,
        positive: Tensor | None = None,
        trajectory_id: Tensor | None = None,
        row_weights: Tensor | None = None,
    ) -> LossScale:
        """Return the counts of `loss_mask` [B, R] bool; `positive` [B] bool marks rows that were right.

        Rows of equal `trajectory_id` [B] int64 are one sequence; without it, each row is one. With
        `row_weights` [B] float, the same for all rows of a trajectory, the counts are weighted sums.
        """
        tokens = loss_mask.bool().sum(-1)
        learned = tokens > 0
        weights = torch.ones_like(tokens) if row_weights is None else row_weights.double()
        sequences = weights[learned]
        if trajectory_id is not None:
            ids, number = trajectory_id[learned].unique(return_inverse=True)
            sequences = weights.new_zeros(len(ids)).scatter(0, number, sequences)
        tokens = tokens * weights
        right = 0.0 if positive is None else float(tokens[positive.bool()].sum())
        return cls(float(tokens.sum()), float(sequences.sum()), right)

    def by_weight(self, per_token: Tensor) -> Tensor:
        """Return per_token [B, R] float times the weight of each row."""
        if self.row_weights is None:
            return per_token
        return per_token * self.row_weights.unsqueeze(-1)

    def weighted(self, per_row: Tensor) -> Tensor:
        """Return per_row [B] float divided by the number of rows of each one's trajectory."""
        if self.trajectory_rows is None:
            return per_row
        return per_row / self.trajectory_rows


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of a loss."""

    loss: Tensor
    """0-d, with gradient."""
    metrics: dict[str, Ratio]


def aggregate(
    per_token: Tensor, mask: Tensor, mode: str, scale: LossScale, scale_factor: float | None = None
) -> Tensor:
    """This micro-batch's share of the mini-batch loss; 0 (with a zero gradient) where the scale counts
    nothing.

    per_token [B, R] float, mask [B, R] bool. `mode` is a name of `catalog.AGGREGATIONS`, which has the
    formula of each. A sequence is a trajectory, and the mean of a row weighs 1 / number of rows of its
    trajectory. Where rows have weights, these are in the sums and in the counts: the loss is a weighted mean.
    Raises ConfigError for another mode, and for the last one without `scale_factor`.
    """
    per_token = scale.by_weight(zero_outside(per_token, mask))
    total = per_token.sum()
    if mode not in AGGREGATIONS:
        raise ConfigError(f"unknown loss_agg_mode {mode!r}: choose from {', '.join(AGGREGATIONS)}")
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        count = scale.num_tokens
    elif mode == "seq-mean-token-sum-norm":
        if scale_factor is None or scale_factor <= 0:
            raise ConfigError(
                f"loss_agg_mode=seq-mean-token-sum-norm needs a loss_scale_factor above 0, got {scale_factor}"
            )
        count = scale.num_sequences * scale_factor
    else:
        count = scale.num_sequences
    if mode == "seq-mean-token-mean":
        total = scale.weighted(masked_mean(per_token, mask, dim=-1)).sum()
    return total / count if count else total * 0.0
