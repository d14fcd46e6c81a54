"""Scores on their tokens: the score of a response is placed on its last sampled token."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.fields import FIELDS
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.request import ScoreRequest

logger = logging.getLogger(__name__)


@dataclass
class Scored:
    """Rows with their scores."""

    batch: DataProto
    dropped: Tensor
    """[B] bool: the reward failed and `reward.on_error=drop` leaves the row out; its score is 0 and means
    nothing.
    """
    metrics: Metrics


def score(batch: DataProto, rewards: RewardManager) -> Scored:
    """Add token_level_scores [B, R] float32 and a column for each extra key of the reward.

    A key with the name of one of our columns, or `reward`, the name of the score in validation, is left out
    with a warning.
    """
    columns = batch.non_tensor_batch
    requests = [
        ScoreRequest(source, text, truth, info)
        for source, text, truth, info in zip(
            columns["data_source"],
            columns["solution_str"],
            columns["ground_truth"],
            columns["extra_info"],
            strict=True,
        )
    ]
    scored = rewards.score(requests)
    scores = torch.tensor(scored.scores, dtype=torch.float32)
    ours = tuple(key for key in scored.extras if key in columns or key in FIELDS or key == "reward")
    if ours:
        _warn_of_names(ours)
    extras = {key: values for key, values in scored.extras.items() if key not in ours}
    batch |= DataProto.from_dict(
        {"token_level_scores": place_scores(scores, batch.batch["response_mask"])}, extras
    )
    metrics = Metrics()
    for name, value in scored.metrics.items():
        if name.endswith("_max"):
            metrics.add_max(name, value)
        else:
            metrics.add_sum(name, value)
    return Scored(batch, torch.tensor(scored.dropped, dtype=torch.bool), metrics)


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Return scores [B] as [B, R], each on the last sampled token of its row.

    A row without sampled tokens gets none.
    """
    placed = torch.zeros(response_mask.shape, dtype=scores.dtype)
    rows = response_mask.any(-1).nonzero().flatten()
    if len(rows):  # else there may be no column at all
        positions = torch.arange(response_mask.shape[1]) * response_mask[rows]
        placed[rows, positions.max(-1).values] = scores[rows]
    return placed


@functools.lru_cache(maxsize=16)
def _warn_of_names(keys: tuple[str, ...]) -> None:
    """Log a warning once for each set of keys, not at every step."""
    logger.warning(
        "the reward returns %s, names of our own columns: not kept; return them by other names",
        ", ".join(keys),
    )
