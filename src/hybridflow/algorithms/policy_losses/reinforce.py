"""The plain policy gradient: REINFORCE (Williams, 1992), which is also the loss of GPG (2504.02546)."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import finish_loss, token_terms


def reinforce(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−A·logπ.

    Shapes and `rollout_is_weights` as in `vanilla`; `old_log_prob` is only measured against. `loss_agg_mode`
    None: token-mean. Metric, as a mean over tokens: `actor/ppo_kl` (logπ_old − logπ); there is no clip to
    report.

    Left out: a correction for several steps on one batch: with more than one mini-batch or epoch the gradient
    is that of samples from the policy as it was. GPG's weight for groups that say nothing is in the estimator
    `gpg`.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    loss = -tokens.advantages * tokens.log_prob
    return finish_loss(
        tokens, loss, scale, rollout_is_weights, loss_agg_mode or "token-mean", loss_scale_factor
    )
