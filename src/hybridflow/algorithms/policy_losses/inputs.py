"""The inputs of all policy losses, and their shared steps: log-ratio first; weights, aggregation, metrics
last.

LossInputs ──tokens──► Tokens ──(a loss)──► loss per token ──finish_loss──► LossOutput
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import (
    LossOutput,
    LossScale,
    Ratio,
    aggregate,
    masked_sum,
    zero_outside,
)
from hybridflow.errors import ConfigError


class Tokens(NamedTuple):
    """Inputs of a policy loss, each [B, R] in float32 or better and 0 outside the mask."""

    mask: Tensor
    """[B, R] bool."""
    log_prob: Tensor
    """logπ, nats, with gradient."""
    old_log_prob: Tensor
    """logπ_old, nats, detached."""
    advantages: Tensor
    """A, detached."""
    log_ratio: Tensor
    """logρ = clamp(logπ − logπ_old, ±20), with gradient inside the bounds."""

    @classmethod
    def of(cls, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tokens:
        """Return the tokens [B, R] of a loss with their log-ratio; only `log_prob` carries a gradient."""
        a = zero_outside(advantages, response_mask).detach()
        old = zero_outside(old_log_prob, response_mask).detach()
        now = zero_outside(log_prob, response_mask)
        return cls(response_mask.bool(), now, old, a, (now - old).clamp(-20.0, 20.0))


@dataclass(frozen=True)
class LossInputs:
    """The inputs of every policy loss: B rows of R tokens of a micro-batch, and the counts of its mini-batch.

    Raises ConfigError where a tensor has not the shape [B, R] of the mask.
    """

    log_prob: Tensor
    """[B, R] float, nats: logπ of each sampled token, with gradient."""
    old_log_prob: Tensor
    """[B, R] float, nats: logπ_old, of the policy as it was before the updates of the step."""
    advantages: Tensor
    """[B, R] float: A of each token."""
    response_mask: Tensor
    """[B, R] bool: the tokens to learn from, which is the batch's `loss_mask`."""
    scale: LossScale
    """Counts of the whole mini-batch, by which losses are divided."""
    rollout_is_weights: Tensor | None = None
    """[B, R] float: they multiply the loss of each token; None: no weights."""
    loss_scale_factor: float | None = None
    """Tokens by which `seq-mean-token-sum-norm` divides."""

    def __post_init__(self) -> None:
        wanted = list(self.response_mask.shape)
        for name in ("response_mask", "log_prob", "old_log_prob", "advantages", "rollout_is_weights"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (tensor.dim() != 2 or list(tensor.shape) != wanted):
                raise ConfigError(
                    f"inputs of a policy loss: {name} got the shape {list(tensor.shape)}, wanted [B, R]: a "
                    f"number a token of each row, like response_mask, which is {wanted}"
                )

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens with their log-ratio."""
        return Tokens.of(self.log_prob, self.old_log_prob, self.advantages, self.response_mask)


def clipped(advantages: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)) [B, R], and where the clip decides [B, R] bool."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    decides = bounded > plain
    return torch.where(decides, bounded, plain), decides


def per_token(row_loss: Tensor, mask: Tensor) -> Tensor:
    """Return a loss per row [B] in equal parts on the row's tokens [B, R]; their sum is the row's loss."""
    kept = mask.bool()
    return zero_outside((row_loss / kept.sum(-1).clamp(min=1)).unsqueeze(-1).expand(kept.shape), kept)


def finish_loss(
    inputs: LossInputs,
    loss: Tensor,
    mode: str,
    fractions: Mapping[str, Tensor] | None = None,
    ratios: Mapping[str, Ratio] | None = None,
) -> LossOutput:
    """Return this micro-batch's share of the loss: loss [B, R] times the weights [B, R], aggregated.

    `fractions` are further metrics [B, R], reported as means over tokens; `ratios` are metrics that count
    something else. `actor/ppo_kl`, the mean of −logρ over tokens, is always reported.
    """
    tokens = inputs.tokens
    if inputs.rollout_is_weights is not None:
        loss = loss * zero_outside(inputs.rollout_is_weights, tokens.mask).detach()
    count = tokens.mask.sum()
    metrics = {
        name: (masked_sum(values, tokens.mask).detach(), count) for name, values in (fractions or {}).items()
    }
    metrics["actor/ppo_kl"] = (masked_sum(-tokens.log_ratio, tokens.mask).detach(), count)
    total = aggregate(loss, tokens.mask, mode, inputs.scale, inputs.loss_scale_factor)
    return LossOutput(total, metrics | dict(ratios or {}))
