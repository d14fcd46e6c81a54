"""Columns that the driver computes from others: rows go in, named columns come out.

uid, acc ──identify──► group_ids, positive
token_level_scores ──apply_kl_penalty──► token_level_rewards ──estimate_advantages──► advantages, returns

There are columns that the driver does without: some stay with a collector, and the driver fetches others.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from hybridflow.algorithms.aggregation import masked_mean
from hybridflow.algorithms.kl import AdaptiveKLController, FixedKLController, clamped_tokens, kl_estimate
from hybridflow.algorithms.policy_losses import PolicyLoss
from hybridflow.algorithms.resampling import resample_rows
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm import AlgorithmConfig, PFPPOConfig
from hybridflow.config.by_source import algorithms_of
from hybridflow.config.needs import tells_top_outcomes
from hybridflow.config.own_code import estimator_fault
from hybridflow.config.source_code import shown
from hybridflow.config.tree import argument_values
from hybridflow.data.plugin import load_function
from hybridflow.errors import ConfigError, RewardError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.packing import TOP_OUTCOMES
from hybridflow.trainer.ppo.reward_watch import repeated_share
from hybridflow.workers.losses import find_policy_loss, loss_parameters

KLController = FixedKLController | AdaptiveKLController

FLOAT32_MAX = torch.finfo(torch.float32).max
TOKENS = ("prompts", "responses")
TEXTS = ("solution_str", "ground_truth", "extra_info")
STAYS = (*TOKENS, *TEXTS, "input_ids", "rollout_log_probs")
"""Columns that stay with the collector."""
MASKS = ("attention_mask", "response_mask")
"""Columns that a collector keeps for the workers, and that the driver computes with too."""
REPETITION = "repetition"
"""The metric of the reward watch, kept in place of the tokens that it is computed from."""


def kl_controller(config: AlgorithmConfig) -> KLController:
    """Return the controller of KL-in-reward that `algorithm.kl_ctrl` asks for."""
    control = config.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKLController(control.kl_coef, target=control.target_kl, horizon=control.horizon)
    return FixedKLController(control.kl_coef)


def find_estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
    """Return the estimator with its name in the table, or a user's own given as `path.py:name`.

    Raises ConfigError for entries of `algorithm.options` that it does not take, and for arguments by which
    no estimator can be called.
    """
    name = algorithm.adv_estimator
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    if estimator is None:
        estimator = AdvantageEstimator.of(load_function(name, key="algorithm.adv_estimator"))
    fault = estimator_fault(inspect.signature(estimator.function), algorithm, any_column=True)
    if fault:
        raise ConfigError(f"algorithm.adv_estimator={shown(name)}: {fault}")
    return estimator


def find_estimators(algorithm: AlgorithmConfig) -> dict[str | None, AdvantageEstimator]:
    """Return the estimator of each data source that has its own, and under None that of all other rows.

    ConfigError, with the data source, where one cannot be called.
    """
    found: dict[str | None, AdvantageEstimator] = {}
    for source, each in algorithms_of(algorithm).items():
        with of_source(source):
            found[source] = find_estimator(each)
    return found


@contextmanager
def of_source(source: str | None) -> Iterator[None]:
    """Name the data source in a ConfigError about its entry of `algorithm.by_source`; None has no entry."""
    try:
        yield
    except ConfigError as error:
        if source is None:
            raise
        raise ConfigError(f"algorithm.by_source, {source}: {error}") from error


def loss_columns(config: PPOConfig) -> list[str]:
    """Return the columns that this run's policy loss reads beside those that every one reads."""
    actor = config.actor_rollout_ref.actor
    loss = find_policy_loss(actor)
    # the check of generation's log-probs looks at rows that the actor's version has sampled
    columns = {*loss.keywords, "rollout_is_weights", "is_demonstration", "policy_version"}
    if actor.use_kl_loss:
        columns.add("ref_log_prob")
    if tells_top_outcomes(config):
        columns.add(TOP_OUTCOMES)
    if config.algorithm.by_source:
        columns |= {"source_weight", "source_kl_coef"}
    if loss.keeps_groups:
        columns.add("group_ids")  # micro-batches are cut by them
    if actor.positive_lm_loss_coef:
        columns.add("positive")
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and not correction.corrects:  # which is measured of whole mini-batches
        columns.add("rollout_log_probs")
    return sorted(columns)


def identify(batch: DataProto) -> DataProto:
    """Return the columns group_ids [B] int64 and positive [B] bool.

    group_ids are equal for the rows of one `uid`. positive is true where `acc` of the trajectory is 1, or
    without `acc` where its score is above 0.
    """
    view = ByTrajectory(batch)
    right = _scores(view.samples) > 0
    if "acc" in batch.non_tensor_batch:
        values = view.samples.non_tensor_batch["acc"]
        known = torch.tensor([isinstance(value, (bool, int, float)) and value == value for value in values])
        right = torch.where(
            known,
            torch.tensor([bool(k) and float(v) >= 1.0 for v, k in zip(values, known, strict=True)]),
            right,
        )
    return _columns(group_ids=group_ids(batch), positive=view.spread(right))


def _scores(samples: DataProto) -> Tensor:
    """Return the score [K] float32 of each sample, the sum over its sampled tokens."""
    scores: Tensor = samples.batch["token_level_scores"] * samples.batch["response_mask"]
    return scores.sum(-1)


def group_ids(batch: DataProto) -> Tensor:
    """Return [B] int64: the same number for rows with the same `uid`, in order of appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor(
        [numbers.setdefault(uid, len(numbers)) for uid in batch.non_tensor_batch["uid"]], dtype=torch.int64
    )


def apply_kl_penalty(
    batch: DataProto, config: AlgorithmConfig, controller: KLController, num_new: int | None = None
) -> tuple[DataProto, Metrics]:
    """token_level_rewards = scores - beta * kl.

    beta is updated after use by the mean over trajectories, or over those of the first `num_new` rows.
    Without KL-in-reward the rewards are the scores.
    """
    scores = batch.batch["token_level_scores"]
    metrics = Metrics()
    if not config.use_kl_in_reward:
        return _columns(token_level_rewards=scores), metrics
    mask = batch.batch["response_mask"]
    kl = kl_estimate(batch.batch["old_log_probs"], batch.batch["ref_log_prob"], config.kl_penalty, mask)
    view = ByTrajectory(batch[:num_new])
    tokens = view.samples.batch["response_mask"].sum(-1)
    current = 0.0
    if bool((tokens > 0).any()):
        current = float((view.join(kl[:num_new]).sum(-1) / tokens.clamp(min=1))[tokens > 0].mean())
    metrics.add_mean("actor/reward_kl_penalty", current)
    metrics.add_last("actor/reward_kl_penalty_coeff", controller.value)
    clamped = clamped_tokens(kl[:num_new], config.kl_penalty)
    if clamped is not None:
        metrics.add_mean("actor/reward_kl_clamped_fraction", clamped.sum(), mask[:num_new].sum())
    rewards = scores - controller.value * kl
    controller.update(current, len(view.samples))
    return _columns(token_level_rewards=rewards), metrics


def estimate_advantages(batch: DataProto, config: PPOConfig, estimator: AdvantageEstimator) -> DataProto:
    """Return advantages and returns, both [B, R] float32, by the estimator of `algorithm.adv_estimator`.

    A trajectory is one row for the estimator, with its sampled tokens in the order of calls. Raises
    ConfigError where values follow each other by that order and branches of a trajectory took turns.
    """
    algorithm = config.algorithm
    view = ByTrajectory(batch)
    samples = view.samples
    if "values" in estimator.needs and view.interleaved:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} goes from a token's value to the next one's, "
            "and some trajectories have branches side by side, whose calls took turns: let the agent finish "
            "one branch before the next, or take an estimator without a critic (grpo, rloo, "
            "reinforce_plus_plus)"
        )
    available = argument_values(algorithm) | argument_values(config.reward) | dict(samples.batch.items())
    available["group_ids"] = group_ids(samples)
    # its key names the rewards, and the argument is their values
    reward_keys = available.pop("reward_components")
    if reward_keys:
        available["reward_components"] = _reward_components(samples, reward_keys)
    result = estimator(available | algorithm.options)
    return _columns(advantages=view.spread(result.advantages), returns=view.spread(result.returns))


def _reward_components(samples: DataProto, keys: list[str]) -> Tensor:
    """Return [B, K] float32: the reward's value of each sample under each of `algorithm.gdpo_reward_keys`.

    The key `score` means the score itself.
    """
    columns: dict[str, Any] = dict(samples.non_tensor_batch)
    # every reward may have failed, and nothing is learned from these rows anyway
    if not bool(samples.batch["loss_mask"].any()):
        return torch.zeros(len(samples), len(keys))
    columns["score"] = _scores(samples).tolist()
    missing = [key for key in keys if key not in columns]
    if missing:
        numbers = [
            key
            for key, values in columns.items()
            if all(isinstance(value, (bool, int, float)) for value in values)
        ]
        raise ConfigError(
            f"algorithm.gdpo_reward_keys names {', '.join(missing)}, which the reward does not return: it "
            f"returns {', '.join(sorted(numbers))}"
        )
    for key in keys:
        odd = [value for value in columns[key] if not isinstance(value, (bool, int, float)) or value != value]
        if odd:
            failed = "; rows whose reward failed have none: reward.on_error=drop leaves them out"
            raise RewardError(
                f"algorithm.gdpo_reward_keys: {key} is {odd[0]!r} for {len(odd)} rows, wanted a number for "
                f"every row{failed}"
            )
        beyond = [value for value in columns[key] if abs(value) > FLOAT32_MAX]
        if beyond:
            raise RewardError(
                f"algorithm.gdpo_reward_keys: {key} is {beyond[0]} for {len(beyond)} rows, wanted a finite "
                f"number that float32 can hold (at most {FLOAT32_MAX:.4g}): scale what the reward returns"
            )
    return torch.tensor(
        [[float(value) for value in columns[key]] for key in keys], dtype=torch.float32
    ).T.contiguous()


def resample(
    batch: DataProto, config: PFPPOConfig, generator: torch.Generator, num_draws: int | None = None
) -> DataProto:
    """Draw trajectories with replacement by their scores (PF-PPO), with all rows and fields: `num_draws` of
    them, or as many as there are.

    Duplicates get fresh row ids; trajectory_id is then the number of the draw.
    """
    view = ByTrajectory(batch)
    drawn = resample_rows(
        _scores(view.samples),
        method=config.reweight_method,
        weight_pow=config.weight_pow,
        generator=generator,
        num_draws=num_draws,
    )
    # [rows of all draws, 2]: the number of the draw, and the row
    rows = (drawn[:, None] == view.sample_of_row).nonzero()
    # a fresh id is not that of a row that was not drawn, either
    above = int(batch.batch["row_id"].max()) if "row_id" in batch else -1
    resampled = batch.select_idxs(rows[:, 1]).fresh_row_ids(above)
    resampled.batch["trajectory_id"] = rows[:, 0].contiguous()
    return resampled


def select_tokens(
    batch: DataProto, config: ActorConfig, base: PolicyLoss, log_probs: Tensor, generator: torch.Generator
) -> DataProto:
    """Return the columns that a loss with a `select` makes of a whole mini-batch.

    log_probs [B, R] float, nats, are those of the current weights.
    """
    assert base.select is not None, "asked of a loss that selects nothing"
    rows = batch.batch
    return _columns(
        **base.select(
            log_probs,
            rows["old_log_probs"],
            rows["advantages"],
            rows["loss_mask"],
            generator,
            **base.select_arguments(loss_parameters(config)),
        )
    )


def leave_out_unpaired(batch: DataProto, base: PolicyLoss) -> None:
    """Narrow `loss_mask` for a loss over groups.

    What stays are tokens with an advantage, in rows that have the other rows that the loss needs.
    """
    if base.keeps_groups:
        batch.narrow_loss_mask(batch.batch["advantages"] != 0)
    if base.learns_from is not None:
        mask = batch.batch["loss_mask"]
        kept = base.learns_from(batch.batch["advantages"], mask, batch.batch["group_ids"])
        batch.narrow_loss_mask(kept.unsqueeze(-1).expand(mask.shape))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the tokens of the mask, 0 where returns do not
    vary.
    """
    spread = _variance(returns, mask)
    if spread < 1e-8:
        return 0.0
    return 1.0 - _variance(returns - values, mask) / spread


def _variance(x: Tensor, mask: Tensor) -> float:
    return float(masked_mean((x - masked_mean(x, mask)) ** 2, mask))


def _columns(**tensors: Tensor) -> DataProto:
    return DataProto.from_dict(dict(tensors))


def divided(rows: DataProto) -> tuple[DataProto, DataProto]:
    """Return the columns that the driver gets, and those that stay; rows without any go whole."""
    if not len(rows):
        return rows, rows
    view = ByTrajectory(rows)
    repeated = repeated_share(view.samples.batch["responses"], view.samples.batch["response_mask"])
    names = [name for name in rows.names() if name not in STAYS]
    light = rows.only(names) | DataProto.from_dict({REPETITION: view.spread(repeated)})
    return light, rows.only((*STAYS, *MASKS))


def whole(rows: DataProto) -> DataProto:
    """Return rows with all columns, as the driver would have made them."""
    rows = rows.materialized()
    if REPETITION in rows:
        rows = rows.select()
        rows.pop([REPETITION])
    return rows


def needs_whole_rows(config: PPOConfig) -> bool:
    """Return whether something reads rows in the driver before the step fetches what it reads itself."""
    trainer = config.trainer
    return bool(trainer.keep_rows or trainer.step_class or config.actor_rollout_ref.rollout.skip.enable)


def columns_fetched(
    config: PPOConfig, estimators: Collection[AdvantageEstimator], loss: PolicyLoss
) -> frozenset[str] | None:
    """Return the remote columns that the driver computes with in every step; None means all.

    PF-PPO draws rows again, with all their columns.
    """
    if config.algorithm.use_pf_ppo or any(estimator.takes_all for estimator in estimators):
        return None
    columns = {name for estimator in estimators for name in (*estimator.needs, *estimator.takes)}
    if config.critic.enable:
        columns.add("values")  # which are measured
    if config.algorithm.use_kl_in_reward:
        columns |= {"old_log_probs", "ref_log_prob"}
    if config.algorithm.rollout_correction.corrects:
        columns |= {"old_log_probs", "rollout_log_probs"}
    if loss.select is not None:
        columns.add("old_log_probs")
    if config.trainer.rollout_data_dir:
        columns |= {*TOKENS, *TEXTS}
    return frozenset(columns)
