"""From logits to tokens: temperature, top-k, top-p, greedy, all rows at once, each row with its own parameters.

    (seed, position) ──uniforms──► u [B] ─┐
    logits [B, V] ──/ temperature──► softmax ──cumulative sum──► first token whose sum passes u ──► tokens, log-probs [B]

The number that decides a token depends on the request's seed and the token's place in the response, never on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models.log_probs import log_probs_from_logits
from hybridflow.rollout.base import SamplingParams


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds."""
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014)
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 [B]; products wrap around."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros (torch's own keeps the sign)."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def stream_keys(seeds: Tensor) -> Tensor:
    """Where each request's stream starts: seeds [B] int64 -> [B] int64. Mixed, so that neighbouring seeds share nothing."""
    return _mix(seeds + _STEP)


def uniforms(keys: Tensor, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number in [0, 1) for each (key, position), both [B] int64: 24 random bits in float32, 53 in float64, never rounded to 1."""
    bits = _mix(keys + positions * _STEP)
    kept = 53 if dtype == torch.float64 else 24
    return _shift(bits, 64 - kept).to(dtype) * 2.0**-kept


@dataclass(frozen=True)
class SamplingPlan:
    """What none of the requests of a call needs can be left out of every step."""

    any_greedy: bool
    all_greedy: bool
    any_limited: bool
    any_temperature: bool

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> SamplingPlan:
        """The plan that serves all of `params`."""
        kinds = {(one.takes_argmax, one.limits_tokens, not one.takes_argmax and one.temperature != 1.0) for one in params}
        greedy = [kind[0] for kind in kinds]
        return cls(any(greedy), all(greedy), any(kind[1] for kind in kinds), any(kind[2] for kind in kinds))


def sample(
    logits: Tensor, plan: SamplingPlan, *, uniform: Tensor | None, temperature: Tensor, top_k: Tensor, top_p: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their log-probs [B] in nats, of logits [B, V] float32 or float64.

    uniform [B] (None when all rows are greedy), temperature [B] (1 for greedy rows), top_k [B] int64 (V: all), top_p [B], greedy [B] bool.
    Log-probs are log softmax(logits / temperature): what training computes, whatever top-k and top-p left out.
    """
    scaled = logits / temperature[:, None] if plan.any_temperature else logits
    if plan.all_greedy:
        tokens = logits.argmax(-1)
        return tokens, log_probs_from_logits(scaled, tokens)
    assert uniform is not None, "sampled rows need their uniform numbers"
    tokens = draw(scaled.softmax(-1), uniform)
    if plan.any_limited:
        rows = ((top_k < logits.shape[-1]) | (top_p < 1)).nonzero()[:, 0]
        tokens[rows] = draw_limited(scaled[rows], uniform[rows], top_k[rows], top_p[rows])
    if plan.any_greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, log_probs_from_logits(scaled, tokens)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: weights [B, V] ≥ 0 with any sum, uniform [B] in [0, 1) -> [B] int64.

    u·sum stays below the sum in floating point too, so a token without weight is never drawn.
    """
    cumulative = weights.cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    # clamped only for rows that are not finite, which the caller turns into errors
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def draw_limited(scaled: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Draw from the top_k [B] most probable tokens of scaled [B, V], cut to the fewest that reach top_p [B] of what these hold."""
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.shape[-1], device=values.device)
    weights = values.masked_fill(ranks >= top_k[:, None], float("-inf")).softmax(-1)
    before = weights.cumsum(-1) - weights
    keep = (before < top_p[:, None].to(weights.dtype)) | (ranks == 0)
    # parallel sums (CUDA) may rise by a rounding behind the last token kept, so the draw is held to it
    choice = torch.minimum(draw(weights * keep, uniform), keep.sum(-1) - 1)
    return order.gather(-1, choice[:, None])[:, 0]
