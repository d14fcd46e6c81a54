"""Self-play preference optimisation (SPPO, 2405.00675): the log-ratio of a response is drawn to a target."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.masked import masked_mean, masked_sum
from hybridflow.algorithms.policy_losses.ratios import finish_loss, per_token, token_terms
from hybridflow.errors import ConfigError


def sppo(
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
    """(Δ − A)² for a row, Δ = Σ_t (logπ − logπ_old) over its tokens, A = η·(s − softmean) from the estimator
    `sppo`.

    Shapes and `rollout_is_weights` as in `vanilla`; A is the mean of the row's advantages, which the
    estimator makes equal; π_old is the policy at the start of the step. A row's loss lies in equal parts on
    its tokens, so that `loss_agg_mode` None, which is seq-mean-token-sum, is the mean over rows; the weights
    multiply these parts. Metrics: `actor/sppo_error` (mean over rows of |Δ − A|, nats), `actor/ppo_kl` (mean
    over tokens of logπ_old − logπ). Raises ConfigError for a trajectory of several rows, whose
    sum would need all of them in one micro-batch.

    Left out: the paper's π_old of a whole round over the data set; here a step is a round. The log-ratio is
    not clamped.
    """
    if scale.trajectory_rows is not None:
        raise ConfigError(
            "loss_mode=sppo compares whole responses, and a trajectory of this mini-batch has several rows: "
            "use an agent that only goes on with its last prompt, or another loss"
        )
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    rows = tokens.mask.any(-1)
    error = masked_sum(tokens.log_prob - tokens.old_log_prob, tokens.mask, dim=-1) - masked_mean(
        tokens.advantages, tokens.mask, dim=-1
    )
    measured = {"actor/sppo_error": (error.detach().abs().sum(), rows.sum())}
    loss = per_token(error.square(), tokens.mask)
    mode = loss_agg_mode or "seq-mean-token-sum"
    return finish_loss(tokens, loss, scale, rollout_is_weights, mode, loss_scale_factor, ratios=measured)
