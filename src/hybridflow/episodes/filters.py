"""Which groups and rows are learned from (DAPO, arXiv 2503.14476): dynamic sampling, and long responses.

    scored rows ──metric_values──► one number a row ──groups_to_keep──► uids ──rows_of──► the rows that stay
    └────────────────────────────────── varied_groups does all of it ───────────────────────────────────┘
    scored rows ──shape_by_keys, shape_overlong──► scores less a penalty, column overlong_reward
                ──filter_overlong──► loss_mask without the rows that were cut

A group whose responses are all right or all wrong has no advantage, so it would only thin out the gradient of
a batch. PRIME (2502.01456) also drops prompts that are too hard or too easy: `min_mean`, `max_mean`. Left
out: a filter on the reward less its KL penalty, which is not known before the log-probs are. What is done
about responses that came near the length limit (§3.4) is for training only; validation shows the reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.config import PPOConfig
from hybridflow.config.algorithm import FilterGroupsConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.columns import place_scores

SCORE = ("score", "seq_reward", "seq_final_reward")
"""Names of `algorithm.filter_groups.metric` for the score of a row, overlong shaping included."""


def varied_groups(rows: DataProto, filters: FilterGroupsConfig) -> DataProto:
    """Return the rows of the groups that `algorithm.filter_groups` keeps."""
    if not len(rows):
        return rows
    samples = ByTrajectory(rows).samples
    values = metric_values(samples, filters.metric)
    uids = list(samples.non_tensor_batch["uid"])
    return rows_of(rows, groups_to_keep(uids, values, min_mean=filters.min_mean, max_mean=filters.max_mean))


def groups_to_keep(
    uids: Sequence[str],
    values: Sequence[float | None],
    *,
    min_mean: float | None = None,
    max_mean: float | None = None,
) -> list[str]:
    """Uids, in order of appearance, of the groups whose values vary (max > min) and whose mean is in
    [min_mean, max_mean].

    A row without a value (None or NaN: its reward failed, or it was not sampled) takes no part; a group of
    fewer than two values does not vary.
    """
    groups: dict[str, list[float]] = {}
    for uid, value in zip(uids, values, strict=True):
        members = groups.setdefault(uid, [])
        if value is not None and not math.isnan(value):
            members.append(value)
    low = -math.inf if min_mean is None else min_mean
    high = math.inf if max_mean is None else max_mean
    return [
        uid
        for uid, members in groups.items()
        if members and max(members) > min(members) and low <= sum(members) / len(members) <= high
    ]


def metric_values(batch: DataProto, metric: str) -> list[float | None]:
    """The metric of each row of a scored batch; None for rows that were not sampled (SPIN's answers of the
    data).

    Raises ConfigError for a key that the reward does not return, or returns as something other than numbers.
    """
    if metric in SCORE:
        values: list[float | None] = list(batch.batch["token_level_scores"].sum(-1).tolist())
    else:
        column = batch.non_tensor_batch.get(metric)
        if column is None or not all(
            value is None or isinstance(value, (bool, int, float)) for value in column
        ):
            numbers = [
                name
                for name, column in batch.non_tensor_batch.items()
                if all(isinstance(value, float) for value in column)
            ]
            raise ConfigError(
                f"algorithm.filter_groups.metric={metric}: the reward returns no number of that name; set "
                "it to score"
                + (f", or one of {', '.join(numbers)}" if numbers else ", or let the reward return it")
            )
        values = [value if value is None else float(value) for value in column]
    if "is_demonstration" in batch:
        values = [
            None if told else value
            for told, value in zip(batch.batch["is_demonstration"].tolist(), values, strict=True)
        ]
    return values


def rows_of(batch: DataProto, uids: Sequence[str]) -> DataProto:
    """The rows of these groups, in the order of the batch."""
    wanted = set(uids)
    return batch.select_idxs([row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in wanted])


def uids_of(batch: DataProto) -> list[str]:
    """The groups of a batch, in order of appearance."""
    return list(dict.fromkeys(batch.non_tensor_batch["uid"]))


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer_len: int, factor: float) -> Tensor:
    """penalty = min(−(length − (max_len − buffer_len)) / buffer_len · factor, 0).

    It is added to the score of a response: 0 up to max_len − buffer_len, −factor at max_len. `lengths` [B]
    int64 -> [B] float32, in units of the score.
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
