"""The advantages of a batch whose rows come of several data sources, each with its own algorithm.

rows ──by data_source──► the rows of each source, as a batch of their own ──its estimator──► advantages of all

`algorithm.by_source` names the algorithms. The rows of other sources enter no baseline, no whitening and no
count of an estimator: the advantages of a source are, to the bit, those of a batch without the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridflow.config import PPOConfig
from hybridflow.config.by_source import algorithms_of, sources_of
from hybridflow.protocol import DataProto
from hybridflow.protocol.fields import FIELDS, fit_column
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimators, of_source


class SourceAdvantages:
    """The advantage estimators of a run: one, and one for each data source that has an algorithm of its own.

    They are found once: a user's file may be edited while the run goes on.
    """

    def __init__(self, config: PPOConfig) -> None:
        """Find the estimators. Raises ConfigError for one that cannot be called."""
        self.config = config
        self.estimators = find_estimators(config.algorithm)
        self._runs = {
            source: replace(config, algorithm=algorithm)
            for source, algorithm in algorithms_of(config.algorithm).items()
        }
        entries = sources_of(config.algorithm)
        self._weights = {source: entry.weight for source, entry in entries.items() if entry.weight != 1.0}
        self._kl_coefs = {
            source: entry.kl_loss_coef for source, entry in entries.items() if entry.kl_loss_coef is not None
        }

    def __call__(self, batch: DataProto) -> DataProto:
        """Return advantages and returns [B, R] float32, and where sources differ in them source_weight and
        source_kl_coef [B] float32.
        """
        if len(self.estimators) == 1:
            return estimate_advantages(batch, self.config, self.estimators[None])
        columns = {
            name: torch.zeros(batch.batch["response_mask"].shape) for name in ("advantages", "returns")
        }
        for source, rows in self._rows(batch).items():
            own = without_others(batch, rows)
            with of_source(source):
                found = estimate_advantages(own, self._runs[source], self.estimators[source])
            for name, column in columns.items():
                values: Tensor = found.batch[name]
                column[rows, : values.shape[1]] = values.float()
        sources = batch.non_tensor_batch["data_source"]
        if self._weights:
            columns["source_weight"] = torch.tensor([self._weights.get(each, 1.0) for each in sources])
        if self._kl_coefs:
            usual = self.config.actor_rollout_ref.actor.kl_loss_coef
            columns["source_kl_coef"] = torch.tensor([self._kl_coefs.get(each, usual) for each in sources])
        return DataProto.from_dict(columns)

    def _rows(self, batch: DataProto) -> dict[str | None, Tensor]:
        """Return the numbers of the rows of each algorithm that has some, by its source."""
        places: dict[str | None, list[int]] = {}
        for row, source in enumerate(batch.non_tensor_batch["data_source"]):
            places.setdefault(source if source in self._runs else None, []).append(row)
        return {source: torch.tensor(rows) for source, rows in places.items()}


def without_others(batch: DataProto, rows: Tensor) -> DataProto:
    """Return the local columns of `rows` [n] int64 as the batch that they alone would have made.

    Its responses are as wide as the longest of these rows: how far a row is padded changes the order in which
    its numbers are added up.
    """
    width = batch.batch["response_mask"].shape[1]
    own = DataProto.from_dict(batch.tensors(), dict(batch.non_tensor_batch), batch.meta_info).select_idxs(
        rows
    )
    prompt = own.batch["attention_mask"].shape[1] - width
    used = own.batch["attention_mask"][:, prompt:].any(0).nonzero()
    longest = int(used.max()) + 1 if len(used) else 1
    shape = own.batch["response_mask"].shape
    cut: dict[str, Tensor] = {}
    for name, column in own.tensors().items():
        if name in FIELDS:
            cut[name] = fit_column(name, column, (prompt, width), (prompt, longest), 0)
        else:  # a column of a user's own
            cut[name] = column[:, :longest] if column.shape[:2] == shape else column
    return own.with_tensors(cut)
