"""Clip-Cov and KL-Cov (2505.22617): some of the tokens that would cost the most entropy get no gradient, or a
KL penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, masked_mean, zero_outside
from hybridflow.algorithms.policy_losses.inputs import LossInputs, Tokens, clipped, finish_loss
from hybridflow.errors import ConfigError


def select_clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    generator: torch.Generator,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> dict[str, Tensor]:
    """A random max(1, int(ratio·tokens)) of the tokens with lb < cov < ub that are not clipped already; cov =
    (A − Ā)·(logπ − mean logπ).

    Shapes as in the loss, for all rows of a mini-batch: the means, the number and the draw are over the whole
    of it. ratio, lb, ub: `clip_cov_ratio`, `clip_cov_lb`, `clip_cov_ub`. Returns `clip_cov_selected` [B, R]
    bool; fewer where there are not that many.
    """
    tokens = Tokens.of(log_prob.detach(), old_log_prob, advantages, response_mask)
    cov = covariance(tokens)
    already = clipped(tokens.advantages, tokens.log_ratio.exp(), clip_low, clip_high)[1]
    candidates = (
        (tokens.mask & (cov > clip_cov_lb) & (cov < clip_cov_ub) & ~already).flatten().nonzero().flatten()
    )
    drawn = torch.randperm(len(candidates), generator=generator, device=generator.device).to(
        candidates.device
    )
    return {
        "clip_cov_selected": marked(tokens.mask, candidates[drawn[: how_many(clip_cov_ratio, tokens.mask)]])
    }


def clip_cov(
    inputs: LossInputs,
    *,
    clip_cov_selected: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)), 0 on selected tokens; ρ = exp(clamp(logπ − logπ_old,
    ±20)).

    clip_cov_selected [B, R] bool is what `select_clip_cov` gave for the mini-batch. ε_low, ε_high:
    `clip_low`, `clip_high`. Selected tokens count in the mean too. Metrics, as means over tokens:
    `actor/pg_clipfrac` (the clip decides), `actor/cov_clipfrac` (selected), `actor/ppo_kl` (logπ_old − logπ).
    Raises ConfigError without the selection. Left out: nothing; there is no dual clip, as in the paper.
    """
    if clip_cov_selected is None:
        raise ConfigError(
            "clip_cov needs clip_cov_selected [B, R]: call select_clip_cov on the whole mini-batch and hand "
            "in its column"
        )
    tokens = inputs.tokens
    loss, clip_decides = clipped(tokens.advantages, tokens.log_ratio.exp(), clip_low, clip_high)
    selected = clip_cov_selected.bool()
    fractions = {"actor/pg_clipfrac": clip_decides & ~selected, "actor/cov_clipfrac": selected}
    loss = torch.where(selected, 0.0, loss)
    return finish_loss(inputs, loss, loss_agg_mode, fractions)


def select_kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    generator: torch.Generator,
    *,
    kl_cov_ratio: float = 2e-4,
) -> dict[str, Tensor]:
    """The max(1, int(ratio·tokens)) tokens of highest cov = (A − Ā)·(logπ − mean logπ), of equals the first.

    Shapes as in the loss, for all rows of a mini-batch: the means and the number are over the whole of it.
    ratio: `kl_cov_ratio`. Nothing is drawn from `generator`. Returns `kl_cov_selected` [B, R] bool.
    """
    tokens = Tokens.of(log_prob.detach(), old_log_prob, advantages, response_mask)
    places = tokens.mask.flatten().nonzero().flatten()
    order = covariance(tokens).flatten()[places].argsort(descending=True, stable=True)
    return {"kl_cov_selected": marked(tokens.mask, places[order[: how_many(kl_cov_ratio, tokens.mask)]])}


def kl_cov(
    inputs: LossInputs,
    *,
    kl_cov_selected: Tensor | None = None,
    ppo_kl_coef: float = 0.1,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """−A·ρ, + coef·|logρ| on selected tokens; ρ = exp(clamp(logπ − logπ_old, ±20)).

    kl_cov_selected [B, R] bool is what `select_kl_cov` gave for the mini-batch. coef: `ppo_kl_coef`. The
    penalty has no gradient where logρ = 0, so it is idle in the first mini-batch of a step. Metrics, as means
    over tokens: `actor/cov_clipfrac` (selected), `actor/ppo_kl` (logπ_old − logπ). Raises ConfigError without
    the selection. Left out: nothing; there is no clip, as in the paper.
    """
    if kl_cov_selected is None:
        raise ConfigError(
            "kl_cov needs kl_cov_selected [B, R]: call select_kl_cov on the whole mini-batch and hand in "
            "its column"
        )
    tokens = inputs.tokens
    selected = kl_cov_selected.bool()
    loss = -tokens.advantages * tokens.log_ratio.exp() + torch.where(
        selected, ppo_kl_coef * tokens.log_ratio.abs(), 0.0
    )
    fractions = {"actor/cov_clipfrac": selected}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)


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
