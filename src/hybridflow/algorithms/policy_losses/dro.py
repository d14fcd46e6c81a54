"""Direct reward optimisation (DRO, 2405.19107): the policy gradient with a squared log-ratio, no clip."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss


def dro(
    inputs: LossInputs,
    *,
    dro_beta: float = 0.1,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """−(A·logπ − ½·β·(logπ − logπ_old)²).

    β: `dro_beta`, above 0. The log-ratio is not clamped here: far tokens are pulled back the harder. Metrics,
    as means over tokens: `actor/dro_penalty` (½·β·(logπ − logπ_old)², nats²), `actor/ppo_kl` (logπ_old −
    logπ).

    Left out: the paper's value function, learned beside the policy: A comes from the advantage estimator; and
    whole responses, for which tokens stand.
    """
    tokens = inputs.tokens
    penalty = 0.5 * dro_beta * (tokens.log_prob - tokens.old_log_prob).square()
    loss = penalty - tokens.advantages * tokens.log_prob
    fractions = {"actor/dro_penalty": penalty}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)
