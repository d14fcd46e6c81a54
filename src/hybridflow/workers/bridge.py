"""The only place that touches both DataProto and the maths: rows in, named columns out.

token_level_scores ──apply_kl_penalty──► token_level_rewards ──estimate_advantages──► advantages, returns
micro-batch + outputs ──policy_loss / critic_loss / sft_loss──► the loss's share, metrics
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from hybridflow.algorithms.aggregation import LossScale, Ratio, aggregate
from hybridflow.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate
from hybridflow.algorithms.masked import masked_mean
from hybridflow.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from hybridflow.algorithms.value_loss import value_loss
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.critic import CriticConfig
from hybridflow.data.plugin import load_function
from hybridflow.engines import LossFn
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

KLController = FixedKLController | AdaptiveKLController

LOSS_SHARES = ("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss", "critic/vf_loss", "train/loss")
"""Metrics that micro-batches and ranks add up to the loss of a mini-batch."""


def kl_controller(config: AlgorithmConfig) -> KLController:
    """The controller of KL-in-reward that `algorithm.kl_ctrl` asks for."""
    control = config.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKLController(control.kl_coef, target=control.target_kl, horizon=control.horizon)
    return FixedKLController(control.kl_coef)


def find_estimator(name: str) -> AdvantageEstimator:
    """An estimator by its name in the table, or a user's own by `path.py:name`."""
    if name in ADVANTAGE_ESTIMATORS:
        return ADVANTAGE_ESTIMATORS[name]
    return AdvantageEstimator.of(load_function(name, key="algorithm.adv_estimator"))


def find_policy_loss(name: str) -> PolicyLoss:
    """A policy loss by its name in the table, or a user's own by `path.py:name`."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    loss: PolicyLoss = load_function(name, key="actor_rollout_ref.actor.policy_loss.loss_mode")
    return loss


def apply_kl_penalty(batch: DataProto, config: AlgorithmConfig, controller: KLController) -> tuple[DataProto, Metrics]:
    """token_level_rewards = scores - beta * kl, beta updated after use; without KL-in-reward the scores as they are."""
    scores, metrics = batch.batch["token_level_scores"], Metrics()
    if not config.use_kl_in_reward:
        return _columns(token_level_rewards=scores), metrics
    mask = batch.batch["response_mask"]
    kl = kl_estimate(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], config.kl_penalty, mask)
    tokens = mask.sum(-1)
    current = float((kl.sum(-1) / tokens.clamp(min=1))[tokens > 0].mean()) if bool((tokens > 0).any()) else 0.0
    metrics.add_mean("actor/reward_kl_penalty", current)
    metrics.add_last("actor/reward_kl_penalty_coeff", controller.value)
    rewards = scores - controller.value * kl
    controller.update(current, len(batch))
    return _columns(token_level_rewards=rewards), metrics


def group_ids(batch: DataProto) -> Tensor:
    """[B] int64: rows with the same `uid` have the same number, numbered in order of appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in batch.non_tensor_batch["uid"]], dtype=torch.int64)


def estimate_advantages(batch: DataProto, config: AlgorithmConfig, estimator: AdvantageEstimator) -> DataProto:
    """advantages and returns, both [B, R] float32, by the estimator of `algorithm.adv_estimator` (`find_estimator`)."""
    available: dict[str, Any] = dict(batch.batch.items())
    available |= {"group_ids": group_ids(batch), "gamma": config.gamma, "lam": config.lam}
    available |= {"norm_by_std": config.norm_adv_by_std_in_grpo, **config.options}
    result = estimator(available)
    return _columns(advantages=result.advantages, returns=result.returns)


def policy_loss(config: ActorConfig, scale: LossScale, base: PolicyLoss) -> LossFn:
    """The actor's loss on a micro-batch, normalised by the counts of its whole mini-batch; `base` is `find_policy_loss`'s."""
    parameters: dict[str, Any] = {"loss_agg_mode": config.loss_agg_mode, "loss_scale_factor": config.loss_scale_factor}
    if config.policy_loss.loss_mode == "vanilla":
        parameters |= {"clip_low": config.clip_low, "clip_high": config.clip_high, "clip_c": config.clip_ratio_c}
    parameters |= config.policy_loss.options
    mode = config.loss_agg_mode or "token-mean"

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        rows, mask = micro.batch, micro.batch["loss_mask"]
        log_prob = outputs["log_probs"]
        out = base(log_prob, rows["old_log_probs"], rows["advantages"], mask, scale, rows.get("rollout_is_weights", None), **parameters)
        metrics = ratios(out.metrics)
        metrics.add_sum("actor/pg_loss", out.loss.detach())
        total = out.loss
        if "entropy" in outputs:
            entropy = aggregate(outputs["entropy"], mask, mode, scale, config.loss_scale_factor)
            total = total - config.entropy_coeff * entropy
            metrics.add_sum("actor/entropy_loss", entropy.detach())
        if config.use_kl_loss:
            estimate = kl_estimate(log_prob, rows["ref_log_prob"], config.kl_loss_type, mask)
            kl = aggregate(estimate, mask, mode, scale, config.loss_scale_factor)
            total = total + config.kl_loss_coef * kl
            metrics.add_sum("actor/kl_loss", kl.detach())
            metrics.add_last("actor/kl_coef", config.kl_loss_coef)
        return total, metrics

    return loss


def critic_loss(config: CriticConfig, scale: LossScale, loss_scale_factor: float | None) -> LossFn:
    """The critic's clipped value loss on a micro-batch, normalised by the counts of its whole mini-batch."""

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        rows = micro.batch
        out = value_loss(
            outputs["values"],
            rows["values"],
            rows["returns"],
            rows["loss_mask"],
            scale,
            clip_range=config.cliprange_value,
            loss_agg_mode=config.loss_agg_mode,
            loss_scale_factor=loss_scale_factor,
        )
        metrics = ratios(out.metrics)
        metrics.add_sum("critic/vf_loss", out.loss.detach())
        return out.loss, metrics

    return loss


def sft_loss(scale: LossScale) -> LossFn:
    """Negative log-likelihood, the mean over all tokens to learn of the mini-batch."""

    def loss(outputs: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
        value = aggregate(-outputs["log_probs"], micro.batch["loss_mask"], "token-mean", scale)
        metrics = Metrics()
        metrics.add_sum("train/loss", value.detach())
        return value, metrics

    return loss


def ratios(values: Mapping[str, Ratio]) -> Metrics:
    """The maths' (numerator, denominator) pairs as metrics that reduce over micro-batches and ranks without bias."""
    metrics = Metrics()
    for name, (numerator, denominator) in values.items():
        metrics.add_mean(name, numerator, denominator)
    return metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of the mask; 0 where returns do not vary."""
    spread = _variance(returns, mask)
    return 0.0 if spread < 1e-8 else 1.0 - _variance(returns - values, mask) / spread


def _variance(x: Tensor, mask: Tensor) -> float:
    return float(masked_mean((x - masked_mean(x, mask)) ** 2, mask))


def _columns(**tensors: Tensor) -> DataProto:
    return DataProto.from_dict(dict(tensors))
