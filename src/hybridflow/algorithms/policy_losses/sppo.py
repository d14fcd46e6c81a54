"""Self-play preference optimisation (SPPO, 2405.00675): a response's log-ratio is regressed to a target."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossOutput, masked_mean, masked_sum
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss, per_token
from hybridflow.errors import ConfigError


def sppo(
    inputs: LossInputs,
    *,
    loss_agg_mode: str = "seq-mean-token-sum",
) -> LossOutput:
    """(Δ − A)² for a row, Δ = Σ_t (logπ − logπ_old) over its tokens, A = η·(s − softmean) from the estimator
    `sppo`.

    A is the mean of the row's advantages, which the estimator makes equal; π_old is the policy at the start
    of the step. A row's loss lies in equal parts on its tokens, so that `seq-mean-token-sum` is the mean over
    rows; the weights multiply these parts. Metrics: `actor/sppo_error` (mean over rows of |Δ − A|, nats),
    `actor/ppo_kl` (mean over tokens of logπ_old − logπ). Raises ConfigError for a trajectory of several rows,
    whose sum would need all of them in one micro-batch.

    Left out: the paper's π_old of a whole round over the data set; here a step is a round. The log-ratio is
    not clamped.
    """
    if inputs.scale.trajectory_rows is not None:
        raise ConfigError(
            "loss_mode=sppo compares whole responses, and a trajectory of this mini-batch has several rows: "
            "use an agent that only goes on with its last prompt, or another loss"
        )
    tokens = inputs.tokens
    rows = tokens.mask.any(-1)
    error = masked_sum(tokens.log_prob - tokens.old_log_prob, tokens.mask, dim=-1) - masked_mean(
        tokens.advantages, tokens.mask, dim=-1
    )
    measured = {"actor/sppo_error": (error.detach().abs().sum(), rows.sum())}
    loss = per_token(error.square(), tokens.mask)
    return finish_loss(inputs, loss, loss_agg_mode, ratios=measured)
