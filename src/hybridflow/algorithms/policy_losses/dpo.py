"""Pairs of sampled rows (online DPO 2402.04792, SPIN 2401.01335) by DPO (2305.18290) or IPO (2310.12036)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms import preference
from hybridflow.algorithms.advantages.groups import group_best, group_sum
from hybridflow.algorithms.aggregation import LossOutput, masked_mean, masked_sum, zero_outside
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss, per_token
from hybridflow.errors import ConfigError


def dpo(
    inputs: LossInputs,
    *,
    ref_log_prob: Tensor,
    group_ids: Tensor,
    trajectory_id: Tensor | None = None,
    dpo_loss: str = "sigmoid",
    dpo_beta: float = 0.1,
    dpo_label_smoothing: float = 0.0,
    loss_agg_mode: str = "seq-mean-token-sum",
) -> LossOutput:
    """mean of −logσ(β·(Δ⁺ − Δ⁻)) over a group's pairs of a row with A > 0 and one with A < 0; Δ = Σ_t (logπ −
    logπ_ref) over a row.

    ref_log_prob [B, R] float, nats; group_ids, trajectory_id [B] int64; group_ids are equal for the rows of
    one prompt, which must be in one micro-batch. Rows of equal `trajectory_id` are one row with the tokens of
    all; without it, each row is one. Only the sign of a row's mean advantage counts. β: `dpo_beta`;
    `dpo_loss` is sigmoid (with `dpo_label_smoothing`: cDPO) or ipo; their equations are in
    `algorithms/preference.py`.

    The group's loss is that of each row that takes part, in equal parts on its tokens; so `loss_agg_mode`
    None, which is seq-mean-token-sum, weighs a group by its rows that take part, over all rows of the
    mini-batch. Metrics: `actor/dpo_accuracy` (share of pairs with Δ⁺ > Δ⁻), `actor/dpo_margin` (mean over
    pairs of β·(Δ⁺ − Δ⁻)), `actor/ppo_kl` (mean over tokens of logπ_old − logπ). Raises ConfigError for
    another `dpo_loss`, and for label smoothing with ipo.

    Left out: SPIN's rounds on one set of samples, and the SFT term that some add.
    """
    tokens = inputs.tokens
    moved = masked_sum(
        tokens.log_prob - zero_outside(ref_log_prob, tokens.mask).detach(), tokens.mask, dim=-1
    )
    row_advantage = masked_mean(tokens.advantages, tokens.mask, dim=-1)
    if trajectory_id is not None:
        moved = group_sum(moved, trajectory_id)
        # the first row represents its trajectory
        first = group_best(torch.zeros_like(row_advantage), tokens.mask.any(-1), trajectory_id)
        row_advantage = row_advantage.where(first, 0.0)
    good = row_advantage > 0
    bad = row_advantage < 0
    chosen, rejected = (good[:, None] & bad[None, :] & (group_ids[:, None] == group_ids[None, :])).nonzero(
        as_tuple=True
    )
    pair_loss = _pair_loss(moved[chosen], moved[rejected], dpo_loss, dpo_beta, dpo_label_smoothing)
    _, group = torch.unique(group_ids, return_inverse=True)
    sums, pairs = (
        moved.new_zeros(len(group)).index_add(0, group[chosen], x)
        for x in (pair_loss, torch.ones_like(pair_loss))
    )
    # a group without a pair has the sum 0
    row_loss = torch.where(good | bad, (sums / pairs.clamp(min=1))[group], 0.0)
    margin = (moved[chosen] - moved[rejected]).detach()
    count = torch.tensor(len(margin), device=margin.device)
    measured = {
        "actor/dpo_accuracy": ((margin > 0).sum(), count),
        "actor/dpo_margin": (dpo_beta * margin.sum(), count),
    }
    loss = per_token(row_loss, tokens.mask)
    return finish_loss(inputs, loss, loss_agg_mode, ratios=measured)


def in_a_pair(advantages: Tensor, loss_mask: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool: rows whose group has a row with the opposite sign of the mean advantage.

    advantages [B, R] float; loss_mask [B, R] bool; group_ids [B] int64. A row without a token in `loss_mask`
    is in no pair.
    """
    row_advantage = masked_mean(advantages, loss_mask, dim=-1)
    good = row_advantage > 0
    bad = row_advantage < 0
    num_good = group_sum(good.to(torch.int64), group_ids)
    num_bad = group_sum(bad.to(torch.int64), group_ids)
    return (good & (num_bad > 0)) | (bad & (num_good > 0))


def _pair_loss(chosen: Tensor, rejected: Tensor, name: str, beta: float, label_smoothing: float) -> Tensor:
    if name == "sigmoid":
        return preference.dpo(chosen, rejected, beta=beta, label_smoothing=label_smoothing)
    if name != "ipo":
        raise ConfigError(f"unknown dpo_loss {name!r}: choose from sigmoid, ipo")
    if label_smoothing:
        raise ConfigError(
            f"dpo_label_smoothing={label_smoothing} has no meaning with dpo_loss=ipo: set it to 0, or "
            "dpo_loss=sigmoid"
        )
    return preference.ipo(chosen, rejected, beta=beta)
