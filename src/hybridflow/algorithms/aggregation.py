"""Aggregation of token losses to one number, normalised by counts that are handed in.

A mini-batch is counted once, as a whole (`LossScale.count`, summed over ranks). Each micro-batch then
contributes its share, so the sum over micro-batches is the loss of the mini-batch, however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.catalog import AGGREGATIONS
from hybridflow.algorithms.masked import masked_mean, zero_outside
from hybridflow.errors import ConfigError

Ratio = tuple[Tensor, Tensor]
"""Numerator and denominator, detached 0-d: their sums over micro-batches and ranks give the exact mean."""


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

    @classmethod
    def count(
        cls, loss_mask: Tensor, positive: Tensor | None = None, trajectory_id: Tensor | None = None
    ) -> LossScale:
        """Return the counts of `loss_mask` [B, R] bool; `positive` [B] bool marks rows that were right.

        Rows of equal `trajectory_id` [B] int64 are one sequence; without it, each row is one.
        """
        tokens = loss_mask.bool().sum(-1)
        right = 0.0 if positive is None else float(tokens[positive.bool()].sum())
        learned = tokens > 0
        num_sequences = int(learned.sum())
        if trajectory_id is not None:
            num_sequences = len(trajectory_id[learned].unique())
        return cls(float(tokens.sum()), float(num_sequences), right)

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
    trajectory. Raises ConfigError for another mode, and for the last one without `scale_factor`.
    """
    total = zero_outside(per_token, mask).sum()
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
