"""KL-Cov (2505.22617): the tokens that would cost the most entropy are held to the old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.covariance import covariance, how_many, marked
from hybridflow.algorithms.policy_losses.ratios import finish_loss, token_terms
from hybridflow.errors import ConfigError


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
    tokens = token_terms(log_prob.detach(), old_log_prob, advantages, response_mask)
    places = tokens.mask.flatten().nonzero().flatten()
    order = covariance(tokens).flatten()[places].argsort(descending=True, stable=True)
    return {"kl_cov_selected": marked(tokens.mask, places[order[: how_many(kl_cov_ratio, tokens.mask)]])}


def kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    kl_cov_selected: Tensor | None = None,
    ppo_kl_coef: float = 0.1,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−A·ρ, + coef·|logρ| on selected tokens; ρ = exp(clamp(logπ − logπ_old, ±20)).

    Shapes and `rollout_is_weights` as in `vanilla`; kl_cov_selected [B, R] bool is what `select_kl_cov` gave
    for the mini-batch. coef: `ppo_kl_coef`. The penalty has no gradient where logρ = 0, so it is idle in the
    first mini-batch of a step. `loss_agg_mode` None: token-mean. Metrics, as means over tokens:
    `actor/cov_clipfrac` (selected), `actor/ppo_kl` (logπ_old − logπ). Raises ConfigError without the
    selection. Left out: nothing; there is no clip, as in the paper.
    """
    if kl_cov_selected is None:
        raise ConfigError(
            "kl_cov needs kl_cov_selected [B, R]: call select_kl_cov on the whole mini-batch and hand in "
            "its column"
        )
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    selected = kl_cov_selected.bool()
    loss = -tokens.advantages * tokens.log_ratio.exp() + torch.where(
        selected, ppo_kl_coef * tokens.log_ratio.abs(), 0.0
    )
    fractions = {"actor/cov_clipfrac": selected}
    return finish_loss(
        tokens, loss, scale, rollout_is_weights, loss_agg_mode or "token-mean", loss_scale_factor, fractions
    )
