"""Collates trajectories into a DataProto: the only way to the batch of a step.

Trajectory, … ──collate──► prompts, responses, masks, log-probs, versions, scores, ids; one row a lineage
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.columns import place_scores
from hybridflow.protocol.packing import ROUTES, make_rows
from hybridflow.protocol.prompt import MEDIA
from hybridflow.protocol.trajectory import Lineage, Trajectory

GROUPS_PER_STEP = 1 << 20
"""The number of a group is step · GROUPS_PER_STEP + its number in the step."""
SAMPLES_PER_GROUP = 1 << 12
ROWS_PER_TRAJECTORY = 1 << 10


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> DataProto:
    """Make a DataProto with a row for each lineage, in the order of the trajectories.

    Tensors: prompts, responses, input_ids, attention_mask, response_mask, loss_mask; on sampled tokens
    rollout_log_probs [B, R] float32 nats, policy_version and call [B, R] int32, which are 0, -1 and 0
    elsewhere; trajectory_id, lineage and row_id [B] int64, ascending by (group, sample, lineage). Where
    trajectories are scored, token_level_scores [B, R] float32 has the score on the last token that each one
    has sampled. Object columns: uid of the group, finish_reason, and what the trajectories have in `extra`.
    No trajectory may have failed.
    """
    assert not any(trajectory.failed for trajectory in trajectories), "a failed trajectory is never a row"
    rows = [(trajectory, lineage) for trajectory in trajectories for lineage in trajectory.lineages]
    tensors = make_rows(
        [lineage.prompt.token_ids for _, lineage in rows],
        [lineage.response_ids for _, lineage in rows],
        pad_token_id,
        response_masks=[lineage.sampled_mask for _, lineage in rows],
    )
    mask = tensors["response_mask"]
    segments = [segment for _, lineage in rows for segment in lineage.segments if segment.sampled]
    log_probs = torch.zeros(mask.shape)
    log_probs[mask] = torch.tensor([value for segment in segments for value in segment.log_probs])
    versions = torch.full(mask.shape, -1, dtype=torch.int32)
    versions[mask] = torch.tensor(
        [version for segment in segments for version in segment.versions], dtype=torch.int32
    )
    calls = torch.zeros(mask.shape, dtype=torch.int32)
    calls[mask] = torch.tensor(
        [segment.call for segment in segments for _ in segment.token_ids], dtype=torch.int32
    )
    ids = [trajectory_id(trajectory) for trajectory in trajectories for _ in trajectory.lineages]
    places = [place for trajectory in trajectories for place in range(len(trajectory.lineages))]
    tensors |= {
        "loss_mask": mask.clone(),
        "rollout_log_probs": log_probs,
        "policy_version": versions,
        "call": calls,
        "trajectory_id": torch.tensor(ids, dtype=torch.int64),
        "lineage": torch.tensor(places, dtype=torch.int64),
        "row_id": torch.tensor(ids, dtype=torch.int64) * ROWS_PER_TRAJECTORY
        + torch.tensor(places, dtype=torch.int64),
    }
    if any(lineage.routes is not None for _, lineage in rows):
        tensors[ROUTES] = _routes([lineage for _, lineage in rows], tensors["attention_mask"])
    columns: dict[str, list[Any]] = {
        "uid": [uid(trajectory) for trajectory, _ in rows],
        "finish_reason": [_FINISH_REASONS[trajectory.outcome.kind] for trajectory, _ in rows],
    }
    if any(lineage.media for _, lineage in rows):
        columns[MEDIA] = [lineage.media for _, lineage in rows]
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.extra)
    columns |= {name: [trajectory.extra.get(name) for trajectory, _ in rows] for name in names}
    batch = DataProto.from_dict(tensors, columns)
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if len(rewards) == len(trajectories):
        view = ByTrajectory(batch)
        scores = place_scores(torch.tensor(rewards, dtype=torch.float32), view.samples.batch["response_mask"])
        _move_turn_rewards(scores, trajectories, view.samples)
        batch.batch["token_level_scores"] = view.spread(scores)
    return batch


def _routes(lineages: Sequence[Lineage], attention_mask: Tensor) -> Tensor:
    """Return the routes of all rows as one column [B, T, W] int16, -1 where a token has none."""
    width = next(lineage.routes.shape[1] for lineage in lineages if lineage.routes is not None)
    column = torch.full((*attention_mask.shape, width), -1, dtype=torch.int16)
    for row, lineage in enumerate(lineages):
        if lineage.routes is not None:
            places = attention_mask[row].nonzero()[: len(lineage.routes), 0]
            column[row, places] = torch.from_numpy(lineage.routes)
    return column


def _move_turn_rewards(scores: Tensor, trajectories: Sequence[Trajectory], samples: DataProto) -> None:
    """Move the part of each score [K, L] that belongs to a call to the last token that the call sampled, and
    that of a single token to the token.
    """
    for place, trajectory in enumerate(trajectories):
        sampled = samples.batch["response_mask"][place]
        if trajectory.token_rewards:
            scores[place][sampled] = torch.tensor(trajectory.token_rewards)
        if not trajectory.turn_rewards:
            continue
        end = int(sampled.nonzero().max())
        calls = samples.batch["call"][place]
        for call, reward in trajectory.turn_rewards.items():
            last = int((sampled & (calls == call)).nonzero().max())
            scores[place, end] -= reward
            scores[place, last] += reward


_FINISH_REASONS = {"finished": "stop", "truncated": "length"}


def trajectory_id(trajectory: Trajectory) -> int:
    """Return a number of the trajectory that is unique in a run and ascends with (group, sample)."""
    assert trajectory.sample < SAMPLES_PER_GROUP and len(trajectory.lineages) <= ROWS_PER_TRAJECTORY, (
        f"sample {trajectory.sample} with {len(trajectory.lineages)} rows: a group has at most "
        f"{SAMPLES_PER_GROUP} samples, a sample at most {ROWS_PER_TRAJECTORY} rows"
    )
    return trajectory.group * SAMPLES_PER_GROUP + trajectory.sample


def uid(trajectory: Trajectory) -> str:
    """Return the name of the trajectory's group, "step-number"."""
    step, number = divmod(trajectory.group, GROUPS_PER_STEP)
    return f"{step}-{number}"


def group_index(uid: str, groups_per_step: int) -> int:
    """Return the index of a training group in the run by its name, the inverse of `uid`."""
    step, number = map(int, uid.split("-"))
    return (step - 1) * groups_per_step + number
