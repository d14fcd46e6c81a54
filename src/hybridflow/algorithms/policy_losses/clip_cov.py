"""Clip-Cov (2505.22617): some of the tokens that would cost the most entropy get no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.covariance import covariance, how_many, marked
from hybridflow.algorithms.policy_losses.ratios import clipped, finish_loss, token_terms
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
    bool; fewer where there are not so many.
    """
    tokens = token_terms(log_prob.detach(), old_log_prob, advantages, response_mask)
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
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    clip_cov_selected: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """max(−A·ρ, −A·clip(ρ, 1 − ε_low, 1 + ε_high)), 0 on selected tokens; ρ = exp(clamp(logπ − logπ_old,
    ±20)).

    Shapes and `rollout_is_weights` as in `vanilla`; clip_cov_selected [B, R] bool is what `select_clip_cov`
    gave for the mini-batch. ε_low, ε_high: `clip_low`, `clip_high`. `loss_agg_mode` None: token-mean, in
    which selected tokens count too. Metrics, as means over tokens: `actor/pg_clipfrac` (the clip decides),
    `actor/cov_clipfrac` (selected), `actor/ppo_kl` (logπ_old − logπ). Raises ConfigError without the
    selection. Left out: nothing; there is no dual clip, as in the paper.
    """
    if clip_cov_selected is None:
        raise ConfigError(
            "clip_cov needs clip_cov_selected [B, R]: call select_clip_cov on the whole mini-batch and hand "
            "in its column"
        )
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    loss, clip_decides = clipped(tokens.advantages, tokens.log_ratio.exp(), clip_low, clip_high)
    selected = clip_cov_selected.bool()
    fractions = {"actor/pg_clipfrac": clip_decides & ~selected, "actor/cov_clipfrac": selected}
    loss = torch.where(selected, 0.0, loss)
    return finish_loss(
        tokens, loss, scale, rollout_is_weights, loss_agg_mode or "token-mean", loss_scale_factor, fractions
    )
