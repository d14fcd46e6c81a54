"""Scores on their tokens: a response's score lands on its last sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.request import ScoreRequest


def score(batch: DataProto, rewards: RewardManager) -> tuple[DataProto, Metrics]:
    """token_level_scores [B, R] float32 and a column for each extra key of the reward; rows that `reward.on_error=drop` left out leave
    the loss (their `loss_mask` is narrowed in place of the batch's)."""
    columns = batch.non_tensor_batch
    requests = [
        ScoreRequest(source, text, truth, info)
        for source, text, truth, info in zip(
            columns["data_source"], columns["solution_str"], columns["ground_truth"], columns["extra_info"], strict=True
        )
    ]
    scored = rewards.score(requests)
    scores = torch.tensor(scored.scores, dtype=torch.float32)
    extras = {key: values for key, values in scored.extras.items() if key not in columns and key != "score"}
    batch |= DataProto.from_dict({"token_level_scores": place_scores(scores, batch.batch["response_mask"])}, extras)
    if any(scored.dropped):
        keep = ~torch.tensor(scored.dropped)
        batch.narrow_loss_mask(keep[:, None].expand_as(batch.batch["loss_mask"]))
    metrics = Metrics()
    for name, value in scored.metrics.items():
        (metrics.add_max if name.endswith("_max") else metrics.add_sum)(name, value)
    return batch, metrics


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """[B] scores to [B, R]: each on the last sampled token of its row; a row without sampled tokens gets none."""
    placed = torch.zeros(response_mask.shape, dtype=scores.dtype)
    rows = response_mask.any(-1).nonzero().flatten()
    if len(rows):  # else there may be no column at all
        positions = torch.arange(response_mask.shape[1]) * response_mask[rows]
        placed[rows, positions.max(-1).values] = scores[rows]
    return placed
