"""Responses that were cut at the length limit (DAPO, arXiv 2503.14476 §3.4): a penalty before it, and a
filter.

    scored rows ──shape_by_keys, shape_overlong──► scores less a penalty, column overlong_reward
                ──filter_overlong──► loss_mask without the rows that were cut

Both are for training only; validation shows the reward itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.config import PPOConfig
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.columns import place_scores


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer_len: int, factor: float) -> Tensor:
    """Return the penalty added to the score of a response: 0 up to max_len − buffer_len, −factor at max_len.

    penalty = min(−(length − (max_len − buffer_len)) / buffer_len · factor, 0); `lengths` [B] int64 -> [B]
    float32, in units of the score.
    """
    over = lengths.to(torch.float32) - (max_len - buffer_len)
    return torch.clamp(-over / buffer_len * factor, max=0.0)


def shape_by_keys(batch: DataProto, config: PPOConfig) -> DataProto:
    """Return a batch whose scores have the penalty that `reward.reward_kwargs` asks for, if it does."""
    limits = config.reward.reward_kwargs
    buffer = limits.overlong_buffer_cfg
    if not buffer.enable:
        return batch
    assert buffer.len is not None, "filled by resolve"
    longest = limits.max_resp_len or config.data.max_response_length
    return shape_overlong(batch, max_len=longest, buffer_len=buffer.len, factor=buffer.penalty_factor)


def shape_overlong(batch: DataProto, *, max_len: int, buffer_len: int, factor: float) -> DataProto:
    """Return a batch whose `token_level_scores` include the penalty, on the last sampled token.

    A trajectory is judged once, and is as long as what the policy wrote in all its rows: tokens that a tool
    has given do not count. The column `overlong_reward` holds the penalty.
    """
    view = ByTrajectory(batch)
    mask = view.samples.batch["response_mask"]
    penalty = overlong_penalty(mask.sum(-1), max_len=max_len, buffer_len=buffer_len, factor=factor)
    shaped = batch.select()
    shaped.batch["token_level_scores"] = batch.batch["token_level_scores"] + view.spread(
        place_scores(penalty, mask)
    )
    return shaped | DataProto.from_dict({}, {"overlong_reward": view.spread(penalty).tolist()})


def filter_overlong(batch: DataProto) -> Metrics:
    """Leave rows that were cut (finish_reason "length") out of the loss, in place; return their share as a
    metric, of trajectories.
    """
    cut = torch.tensor(
        [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]], dtype=torch.bool
    )
    batch.narrow_loss_mask(~cut[:, None].expand_as(batch.batch["loss_mask"]))
    metrics = Metrics()
    samples = cut[ByTrajectory(batch).first_rows]
    metrics.add_mean("training/overlong_filtered_ratio", float(samples.sum()), float(len(samples)))
    return metrics
