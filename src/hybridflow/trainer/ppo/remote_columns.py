"""The columns that the driver does without: which stay with a collector, and which the driver fetches."""

from __future__ import annotations

from hybridflow.algorithms.advantages import AdvantageEstimator
from hybridflow.algorithms.policy_losses import PolicyLoss
from hybridflow.config import PPOConfig
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.trainer.ppo.reward_watch import repeated_share

TOKENS = ("prompts", "responses")
TEXTS = ("solution_str", "ground_truth", "extra_info")
STAYS = (*TOKENS, *TEXTS, "input_ids", "rollout_log_probs")
"""Columns that stay with the collector."""
MASKS = ("attention_mask", "response_mask")
"""Columns that a collector keeps for the workers, and that the driver computes with too."""
REPETITION = "repetition"
"""The figure of the reward watch, which stands for the tokens that it is computed from."""


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
    config: PPOConfig, estimator: AdvantageEstimator, loss: PolicyLoss
) -> frozenset[str] | None:
    """Return the remote columns that the driver computes with in every step; None means all.

    PF-PPO draws rows again, with all their columns.
    """
    if config.algorithm.use_pf_ppo or estimator.takes_all:
        return None
    columns = {*estimator.needs, *estimator.takes}
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
