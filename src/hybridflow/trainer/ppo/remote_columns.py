"""The columns of collected rows: which of them stay outside of the driver, and who needs them here."""

from __future__ import annotations

from collections.abc import Collection

from hybridflow.config import PPOConfig
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.trainer.ppo.reward_watch import repeated_share
from hybridflow.workers.losses import find_policy_loss

STAYS = (
    "prompts",
    "responses",
    "input_ids",
    "rollout_log_probs",
    "solution_str",
    "ground_truth",
    "extra_info",
)
"""Columns of tokens and texts that stay with the collector."""
MASKS = ("attention_mask", "response_mask")
"""Columns that workers read there, and that the driver computes with."""
REPETITION = "repetition"
"""The figure of the reward watch, which stands for the tokens that it is computed from."""


def divided(rows: DataProto) -> tuple[DataProto, DataProto]:
    """Return the columns that the driver gets, and those that stay; rows without any go whole."""
    if not len(rows):
        return rows, rows
    view = ByTrajectory(rows)
    repeated = repeated_share(view.samples.batch["responses"], view.samples.batch["response_mask"])
    names = [name for name in rows.names() if name not in STAYS]
    light = _columns(rows, names) | DataProto.from_dict({REPETITION: view.spread(repeated)})
    return light, _columns(rows, (*STAYS, *MASKS))


def _columns(rows: DataProto, names: Collection[str]) -> DataProto:
    objects = [name for name in names if name in rows.non_tensor_batch]
    return rows.select([name for name in names if name not in objects], objects)


def whole(rows: DataProto) -> DataProto:
    """Return rows with all columns, as the driver would have made them."""
    rows = rows.materialized()
    if REPETITION in rows:
        rows.pop([REPETITION])
    return rows


def needs_whole_rows(config: PPOConfig) -> bool:
    """Return whether something reads columns in the driver at each step that are with collectors, or names
    one that the step does not keep remote.
    """
    trainer = config.trainer
    estimator = find_estimator(config.algorithm)
    named = {*estimator.needs, *estimator.takes, *find_policy_loss(config.actor_rollout_ref.actor).keywords}
    return bool(
        trainer.keep_rows
        or trainer.rollout_data_dir
        or trainer.step_class
        or config.actor_rollout_ref.rollout.skip.enable
        or config.algorithm.use_pf_ppo
        or estimator.takes_all
        or named & {"prompts", "responses"}
    )
