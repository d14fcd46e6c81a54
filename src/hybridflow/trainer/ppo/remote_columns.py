"""The columns of collected rows: which of them stay outside of the driver, and who needs them here."""

from __future__ import annotations

from hybridflow.config import PPOConfig
from hybridflow.controller.stored_rows import with_stored
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.trainer.ppo.reward_watch import repeated_share
from hybridflow.workers.losses import find_policy_loss

STAYS = ("prompts", "responses", "input_ids", "rollout_log_probs")
"""Columns of tokens that are nowhere but in the store."""
SHARED = ("attention_mask", "response_mask", "policy_version", "call")
"""Columns of tokens that the driver computes with; of these the store has the masks for workers too."""
TEXTS = ("solution_str", "ground_truth", "extra_info")
"""Object columns that are nowhere but in the store."""
STORED = (*STAYS, *SHARED, *TEXTS)
REPETITION = "repetition"
"""The figure of the reward watch, which stands for the tokens that it is computed from."""


def divided(rows: DataProto) -> tuple[DataProto, DataProto]:
    """Return the columns that the driver gets, and those that stay; rows without any go whole."""
    if not len(rows):
        return rows, rows
    view = ByTrajectory(rows)
    repeated = repeated_share(view.samples.batch["responses"], view.samples.batch["response_mask"])
    tensors = [name for name in map(str, rows.batch.keys()) if name not in STAYS]
    objects = [name for name in rows.non_tensor_batch if name not in TEXTS]
    light = rows.select(tensors, objects) | DataProto.from_dict({REPETITION: view.spread(repeated)})
    return light, rows.select([*STAYS, *SHARED], list(TEXTS))


def whole(rows: DataProto) -> DataProto:
    """Return rows with all columns, as the driver would have made them."""
    rows = with_stored(rows)
    if REPETITION in rows:
        rows = rows.select()
        rows.pop([REPETITION])
    return rows


def needs_whole_rows(config: PPOConfig) -> bool:
    """Return whether something reads columns in the driver at each step that are with collectors, or names
    one that the step does not put into the row store.
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
