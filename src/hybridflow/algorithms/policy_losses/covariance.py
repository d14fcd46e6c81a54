"""How much each token's update costs in entropy: its part of the covariance of A and logπ (2505.22617)."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.masked import masked_mean, zero_outside
from hybridflow.algorithms.policy_losses.ratios import Tokens


def covariance(tokens: Tokens) -> Tensor:
    """cov_t = (A − Ā)·(logπ − mean logπ) [B, R] float, detached; means over the tokens of a mini-batch."""
    log_prob = tokens.log_prob.detach()
    centred = (tokens.advantages - masked_mean(tokens.advantages, tokens.mask)) * (
        log_prob - masked_mean(log_prob, tokens.mask)
    )
    return zero_outside(centred, tokens.mask)


def how_many(ratio: float, mask: Tensor) -> int:
    """max(1, int(ratio·tokens)): how many tokens the two losses take."""
    return max(1, int(ratio * int(mask.bool().sum())))


def marked(like: Tensor, places: Tensor) -> Tensor:
    """[B, R] bool, true at `places` [K] int64, counted row by row."""
    out = like.new_zeros(like.numel(), dtype=like.dtype)
    out[places] = True
    return out.view(like.shape)
