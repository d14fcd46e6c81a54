"""The plain policy gradient: REINFORCE (Williams, 1992), which is also the loss of GPG (2504.02546)."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss


def reinforce(
    inputs: LossInputs,
    *,
    loss_agg_mode: str = "token-mean",
) -> LossOutput:
    """−A·logπ.

    `old_log_prob` is only measured against. Metric, as a mean over tokens: `actor/ppo_kl` (logπ_old − logπ);
    there is no clip to report.

    Left out: a correction for several steps on one batch: with more than one mini-batch or epoch the gradient
    is that of samples from the policy as it was. GPG's weight for groups that say nothing is in the estimator
    `gpg`.
    """
    tokens = inputs.tokens
    loss = -tokens.advantages * tokens.log_prob
    return finish_loss(inputs, loss, loss_agg_mode)
