"""Process reinforcement through implicit rewards: PRIME, Cui et al., 2502.01456."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import group_sum, learned_from, scored
from hybridflow.algorithms.advantages.recursion import discounted_sum, still_to_come
from hybridflow.algorithms.advantages.rloo import leave_one_out
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import masked_mean, masked_whiten, zero_outside


def prime(
    process_rewards: Tensor,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    process_coef: float,
    outcome_coef: float,
    loss_mask: Tensor | None = None,
) -> Advantages:
    """p_t = n/(n − 1)·q_t − Σ_j q̄_j/(n − 1); o = n/(n − 1)·(s − μ_g) on the last token;
    G_t = Σ_{t' ≥ t} (c_p·p_t' + c_o·o_t'); A = whiten(G); returns = G.

    process_rewards q, token_level_rewards [B, R] float; response_mask [B, R] bool; group_ids [B] int64, equal
    for the responses of one prompt. q_t is the implicit process reward β·(logπ_rm − logπ_ref), q̄_j its mean
    over the sampled tokens of row j; s = Σ_t r_t over sampled tokens; n and μ_g are number and mean of the
    group's rows with a sampled token; c_p = `process_coef`, c_o = `outcome_coef` (5 and 5 in the authors'
    runs). Whitening is over the tokens of `loss_mask` (default: `response_mask`). A row alone in its group
    gets 0. Where all scores of a group are equal the outcome's part is exactly 0; the process rewards still
    speak.

    Left out: discounting, and the division of q by its largest return (an option of the authors' code).
    """
    mask, _, group = scored(token_level_rewards, response_mask, group_ids)
    q = zero_outside(process_rewards, mask)
    n = group.size.to(q.dtype).unsqueeze(-1)
    others = (n - 1).clamp(min=1)
    of_group = group_sum(masked_mean(q, mask, dim=-1), group_ids).unsqueeze(-1)
    process = n / others * q - of_group / others
    outcome = zero_outside(leave_one_out(group).unsqueeze(-1), still_to_come(mask) == 1)
    compared = n > 1
    returns = discounted_sum(process_coef * process + outcome_coef * outcome, mask, 1.0).where(compared, 0.0)
    return Advantages(
        advantages=masked_whiten(returns, learned_from(mask, loss_mask)).where(compared, 0.0), returns=returns
    )
