"""Generalised advantage estimation, Schulman et al., 1506.02438, with VAPO's two options, Yue et al.,
2504.05118.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages.groups import learned_from
from hybridflow.algorithms.advantages.recursion import discounted_sum, next_step
from hybridflow.algorithms.advantages.types import Advantages
from hybridflow.algorithms.aggregation import masked_whiten, zero_outside


def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    lam_critic: float | None = None,
    lam_length_alpha: float | None = None,
    loss_mask: Tensor | None = None,
) -> Advantages:
    """δ_t = r_t + γ·V_next − V_t; L_t = δ_t + γ·λ_t·L_next, right to left; A = whiten(L); returns = L + V, L
    with λ_t = λ_critic there; λ_t = 1 − 1/(α·len), clamped to [0, 1], or λ without `lam_length_alpha`.

    token_level_rewards, values [B, R] float, in units of the score; response_mask [B, R] bool. Tokens that
    the policy did not sample are no steps: V_next and L pass them unchanged. After the last token V_next = 0:
    a row cut at the length limit counts as ended. The recursion runs on `response_mask`, whitening over
    `loss_mask` (default: the same).

    VAPO (2504.05118): `lam_length_alpha` is its α, and len the row's sampled tokens; `lam_critic` is the λ of
    the returns (VAPO: 1), by default `lam`. The clamp is ours: rows shorter than 1/α tokens (20 with the
    paper's α = 0.05) would get a λ below 0.

    Left out: bootstrapping from the value of what a cut row would have gone on with.
    """
    mask = response_mask.bool()
    state_values = zero_outside(values, mask)
    delta = zero_outside(token_level_rewards, mask) + gamma * next_step(state_values, mask) - state_values
    policy_lam: float | Tensor = lam
    if lam_length_alpha is not None:
        policy_lam = (1 - 1 / (lam_length_alpha * mask.sum(-1).clamp(min=1).to(delta.dtype))).clamp(0.0, 1.0)
    running = discounted_sum(delta, mask, gamma * policy_lam)
    own_lam = lam if lam_critic is None else lam_critic
    to_teach = running
    if lam_length_alpha is not None or own_lam != lam:
        to_teach = discounted_sum(delta, mask, gamma * own_lam)
    return Advantages(
        advantages=masked_whiten(running, learned_from(mask, loss_mask)),
        returns=zero_outside(to_teach + state_values, mask),
    )
