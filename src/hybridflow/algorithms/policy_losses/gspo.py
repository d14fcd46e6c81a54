"""Group sequence policy optimisation (GSPO, 2507.18071): one importance ratio for a whole response."""

from __future__ import annotations

from hybridflow.algorithms.aggregation import LossOutput, masked_mean
from hybridflow.algorithms.policy_losses.inputs import LossInputs, clipped, finish_loss


def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    loss_agg_mode: str = "seq-mean-token-mean",
) -> LossOutput:
    """max(−A·s_t, −A·clip(s_t, 1 − ε_low, 1 + ε_high)), s_t = sg[s_i]·π_t/sg[π_t], s_i = exp(mean_t(logπ −
    logπ_old)) over the row.

    sg stops the gradient, so that s_t has the value of the row's ratio and each token its own gradient (the
    paper's GSPO-token). ε_low, ε_high: `clip_low`, `clip_high`; they are far smaller than PPO's because the
    mean over a row hardly moves. Metrics, as means over tokens: `actor/pg_clipfrac` (the clip decides),
    `actor/ppo_kl` (logπ_old − logπ).

    Beside the paper: the mean log-ratio is clamped to ±20, so that nothing overflows; each row of a
    trajectory has its own ratio. Left out: the form without tokens, whose gradient this has where the
    tokens of a row share one advantage.
    """
    tokens = inputs.tokens
    moved = masked_mean(tokens.log_prob - tokens.old_log_prob, tokens.mask, dim=-1)
    sequence = moved.clamp(-20.0, 20.0).exp().detach().unsqueeze(-1)
    ratio = sequence * (tokens.log_prob - tokens.log_prob.detach()).exp()
    loss, clip_decides = clipped(tokens.advantages, ratio, clip_low, clip_high)
    fractions = {"actor/pg_clipfrac": clip_decides}
    return finish_loss(inputs, loss, loss_agg_mode, fractions)
