"""Direct reward optimisation (DRO, 2405.19107): the policy gradient with a squared log-ratio, no clip."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale
from hybridflow.algorithms.policy_losses.ratios import finish_loss, token_terms


def dro(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scale: LossScale,
    rollout_is_weights: Tensor | None = None,
    *,
    dro_beta: float = 0.1,
    loss_agg_mode: str | None = None,
    loss_scale_factor: float | None = None,
) -> LossOutput:
    """−(A·logπ − ½·β·(logπ − logπ_old)²).

    Shapes and `rollout_is_weights` as in `vanilla`; β: `dro_beta`, above 0. The log-ratio is not clamped
    here: far tokens are pulled back the harder. `loss_agg_mode` None: token-mean. Metrics, as means over
    tokens: `actor/dro_penalty` (½·β·(logπ − logπ_old)², nats²), `actor/ppo_kl` (logπ_old − logπ).

    Left out: the paper's value function, learned beside the policy: A comes from the advantage estimator; and
    whole responses, for which tokens stand.
    """
    tokens = token_terms(log_prob, old_log_prob, advantages, response_mask)
    penalty = 0.5 * dro_beta * (tokens.log_prob - tokens.old_log_prob).square()
    loss = penalty - tokens.advantages * tokens.log_prob
    fractions = {"actor/dro_penalty": penalty}
    return finish_loss(
        tokens, loss, scale, rollout_is_weights, loss_agg_mode or "token-mean", loss_scale_factor, fractions
    )
