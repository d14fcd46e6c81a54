"""The losses of the roles: micro-batch and outputs of the model go in, the loss's share and metrics come out.

config ──find_policy_loss──► PolicyLoss ──policy_loss / critic_loss / sft_loss──► LossFn of an engine
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale, Ratio, aggregate, masked_sum, zero_outside
from hybridflow.algorithms.kl import clamped_tokens, kl_estimate
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, LossInputs, PolicyLoss
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.algorithms.value_loss import value_loss
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.needs import wants_full_kl
from hybridflow.config.own_code import loss_fault
from hybridflow.config.root import CriticConfig, DistillationLossConfig
from hybridflow.config.source_code import shown
from hybridflow.config.tree import argument_values
from hybridflow.data.plugin import load_function
from hybridflow.engines import LossFn
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import TOP_OUTCOMES
from hybridflow.workers.correction import correction_means, sampled_rows
from hybridflow.workers.log_prob_check import LogProbCheck, look_first

LOSS_SHARES = (
    "actor/pg_loss",
    "actor/entropy_loss",
    "actor/kl_loss",
    "actor/distillation_loss",
    "actor/positive_lm_loss",
    "critic/vf_loss",
    "process_reward/loss",
    "train/loss",
)
"""Metrics that micro-batches and ranks add up to the loss of a mini-batch."""


FULL_KL_ANSWER = "full_kl"
"""The name by which an engine answers `OutputSpec(full_kl=True)`."""
TRAJECTORY_COLUMNS = ("trajectory_id", "trajectory_rows")
"""Columns by which the losses of every update count trajectories, where the batch has them."""


def find_policy_loss(config: ActorConfig) -> PolicyLoss:
    """Return the policy loss with its name in the table, or a user's own given as `path.py:name`.

    Raises ConfigError for entries of `policy_loss.options` that it does not take, and for arguments by which
    no loss can be called.
    """
    name = config.policy_loss.loss_mode
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    loss = POLICY_LOSSES.get(name)
    if loss is None:
        function = load_function(name, key=key)
        registered = [
            known
            for known in POLICY_LOSSES.values()
            if known.function is getattr(function, "__wrapped__", function)
        ]
        loss = PolicyLoss(function)
        if registered:
            loss = replace(registered[0], function=function)
    if fault := loss_fault(inspect.signature(loss.function), config, any_column=True):
        raise ConfigError(f"{key}={shown(name)}: {fault}")
    return loss


def loss_parameters(config: ActorConfig) -> dict[str, Any]:
    """Return the parameters of the run by the names under which losses take them."""
    return argument_values(config) | config.policy_loss.options


def policy_loss(
    config: ActorConfig,
    scale: LossScale,
    base: PolicyLoss,
    watch: LogProbCheck | None = None,
    distillation: DistillationLossConfig | None = None,
) -> LossFn:
    """Return the actor's loss on a micro-batch, normalised by the counts of its whole mini-batch.

    `base` is the result of `find_policy_loss`. With `watch` the log-probs and the entropy are checked first.
    With `distillation` the divergence from the teacher is a term, or takes the place of the policy loss.
    """
    parameters = loss_parameters(config)
    mode = config.loss_agg_mode or base.agg_mode

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        rows = micro.batch
        mask = micro.batch["loss_mask"]
        log_prob = outputs["log_probs"]
        shares = of_micro_batch(scale, micro)
        inputs = LossInputs(
            log_prob,
            rows["old_log_probs"],
            rows["advantages"],
            mask,
            shares,
            rows.get("rollout_is_weights", None),
            config.loss_scale_factor,
        )
        metrics = Metrics()
        if watch is not None:
            metrics = look_first(outputs, micro, watch)
        total = torch.zeros((), device=log_prob.device)
        if distillation is None or distillation.use_task_rewards:
            places, named = base.arguments(inputs, parameters | dict(rows.items()))
            out = base.checked(base.function(*places, **named))
            metrics.update(ratios(out.metrics))
            metrics.add_sum("actor/pg_loss", out.loss.detach())
            total = out.loss
        # bypass mode: the one place where current log-probs are to be had for nothing
        if "rollout_log_probs" in rows:
            sampled = mask & sampled_rows(micro)[:, None]
            metrics.update(correction_means(log_prob, rows["rollout_log_probs"], sampled))
        if distillation is not None:
            apart = zero_outside(outputs["divergence"], mask)
            if distillation.loss_max_clamp is not None:
                apart = apart.clamp(max=distillation.loss_max_clamp)
            taught = aggregate(apart, mask, mode, shares, config.loss_scale_factor)
            total = total + distillation.distillation_loss_coef * taught
            metrics.add_sum("actor/distillation_loss", taught.detach())
            if TOP_OUTCOMES in rows:
                rest = zero_outside(rows[TOP_OUTCOMES][..., -1], mask).exp()
                metrics.add_mean("actor/distillation_rest", masked_sum(rest, mask), mask.sum())
        if config.entropy_coeff and "entropy" in outputs:
            entropy = aggregate(outputs["entropy"], mask, mode, shares, config.loss_scale_factor)
            total = total - config.entropy_coeff * entropy
            metrics.add_sum("actor/entropy_loss", entropy.detach())
        if config.use_kl_loss:
            if wants_full_kl(config):
                estimate = zero_outside(outputs[FULL_KL_ANSWER], mask)
            else:
                estimate = kl_estimate(log_prob, rows["ref_log_prob"], config.kl_loss_type, mask)
            kl = aggregate(estimate, mask, mode, shares, config.loss_scale_factor)
            metrics.add_sum("actor/kl_loss", kl.detach())
            if "source_kl_coef" in rows:
                charged = zero_outside(estimate, mask) * rows["source_kl_coef"].unsqueeze(-1)
                total = total + aggregate(charged, mask, mode, shares, config.loss_scale_factor)
            else:
                total = total + config.kl_loss_coef * kl
                metrics.add_last("actor/kl_coef", config.kl_loss_coef)
            clamped = clamped_tokens(estimate, config.kl_loss_type)
            if clamped is not None:
                metrics.add_mean("actor/kl_clamped_fraction", clamped.sum(), mask.sum())
        if config.positive_lm_loss_coef:
            likelihood = positive_example_loss(log_prob, mask, rows["positive"], shares)
            total = total + config.positive_lm_loss_coef * likelihood
            metrics.add_sum("actor/positive_lm_loss", likelihood.detach())
        return total, metrics

    return loss


def critic_loss(config: CriticConfig, scale: LossScale, loss_scale_factor: float | None) -> LossFn:
    """Return the critic's clipped value loss on a micro-batch, normalised by the counts of its whole
    mini-batch.
    """

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        rows = micro.batch
        out = value_loss(
            outputs["values"],
            rows["values"],
            rows["returns"],
            rows["loss_mask"],
            of_micro_batch(scale, micro),
            clip_range=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
            loss_scale_factor=loss_scale_factor,
        )
        metrics = ratios(out.metrics)
        metrics.add_sum("critic/vf_loss", out.loss.detach())
        return out.loss, metrics

    return loss


def of_micro_batch(scale: LossScale, micro: DataProto) -> LossScale:
    """Return the counts of the mini-batch with the weights of the rows of one of its micro-batches."""
    rows = micro.batch
    return replace(
        scale,
        trajectory_rows=rows.get("trajectory_rows", None),
        row_weights=rows.get("source_weight", None),
    )


def sft_loss(scale: LossScale) -> LossFn:
    """Return the negative log-likelihood, the mean over all tokens of the mini-batch to learn."""

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        value = aggregate(-outputs["log_probs"], micro.batch["loss_mask"], "token-mean", scale)
        metrics = Metrics()
        metrics.add_sum("train/loss", value.detach())
        return value, metrics

    return loss


def ratios(values: Mapping[str, Ratio]) -> Metrics:
    """Return (numerator, denominator) pairs as metrics that add up over micro-batches and ranks."""
    metrics = Metrics()
    for name, (numerator, denominator) in values.items():
        metrics.add_mean(name, numerator, denominator)
    return metrics
