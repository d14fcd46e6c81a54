"""The entropy bonus: per-token entropies in, their share of the loss out."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale, aggregate
from hybridflow.algorithms.masked import masked_sum


def entropy_bonus(
    entropy: Tensor,
    mask: Tensor,
    scale: LossScale,
    *,
    coeff: float,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−coeff·agg(H): entropy [B, R] float, nats, of the temperature-scaled distribution; mask [B, R] bool is the loss mask.

    Metric `actor/entropy`: the token mean of H.
    """
    share = aggregate(entropy, mask, loss_agg_mode or "token-mean", scale, loss_scale_factor)
    return LossOutput(-coeff * share, {"actor/entropy": (masked_sum(entropy, mask).detach(), mask.bool().sum())})
