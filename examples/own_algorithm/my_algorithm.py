"""An advantage estimator and a policy loss of your own, without a change to the package.

    mine=examples/own_algorithm/my_algorithm.py
    hybridflow train --recipe tiny/grpo actor_rollout_ref.model.path=demo/sft/model \\
        algorithm.adv_estimator=$mine:median_baseline algorithm.options='{floor: 0.1}' \\
        actor_rollout_ref.actor.policy_loss.loss_mode=$mine:quadratic_ratio \\
        actor_rollout_ref.actor.policy_loss.options='{width: 0.5}'

Each function gets the values that its arguments name, and none besides: columns of the batch, parameters of
the run, and the entries of its `options`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import Advantages
from hybridflow.algorithms.aggregation import LossOutput, aggregate
from hybridflow.algorithms.policy_losses import LossInputs


def median_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, floor: float = 0.0
) -> Advantages:
    """A = s − median of the group, 0 where |A| is below `floor`.

    token_level_rewards [B, R] float, response_mask [B, R] bool, group_ids [B] int64.
    """
    scores = (token_level_rewards * response_mask).sum(-1)
    advantages = torch.zeros_like(scores)
    for group in group_ids.unique():
        rows = group_ids == group
        advantages[rows] = scores[rows] - scores[rows].median()
    advantages = advantages.where(advantages.abs() >= floor, 0.0)
    per_token = advantages[:, None] * response_mask
    return Advantages(advantages=per_token, returns=per_token)


def quadratic_ratio(
    inputs: LossInputs, *, width: float = 1.0, loss_agg_mode: str = "token-mean"
) -> LossOutput:
    """−A·ρ + (ρ − 1)²/(2·width): a pull back to the old policy in place of a clip.

    The tensors of `inputs` are [B, R]. Its `response_mask` marks the tokens that may be learned from. Its
    `scale` counts the whole mini-batch: divide by nothing else.
    """
    mask = inputs.response_mask
    ratio = (inputs.log_prob - inputs.old_log_prob).clamp(-20.0, 20.0).exp()
    loss = -inputs.advantages * ratio + (ratio - 1.0).square() / (2.0 * width)
    if inputs.rollout_is_weights is not None:
        loss = loss * inputs.rollout_is_weights
    far = ((ratio - 1.0).abs() > width) & mask
    return LossOutput(
        aggregate(loss, mask, loss_agg_mode, inputs.scale, inputs.loss_scale_factor),
        # numerator and denominator: means over any split are exact
        {"actor/ratio_far": (far.sum(), mask.sum())},
    )
